"""`grpo run`: continue a stopped run, prove that continuing changes nothing, ask where a number comes from.

Exit codes of `resume` are those of the run: 0 fine, 1 its parity report is a FAIL or a part failed, 2 the command is
wrong or the run cannot be read. `prove-resume`: 0 proven, 1 not.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from grpo_lib import cli_lineage
from grpo_lib.config import TRAINERS, resolve
from grpo_lib.errors import DataError
from grpo_lib.recipes import default_recipe
from grpo_lib.timing import SPANS

_RUN = "a run's folder, or its Metaflow id such as GRPOFlow/123 or 123"
_STAGES = ("fit", "evaluate", "parity_report")
_RESUME = """\
Continue a stopped run in its own folder, without Metaflow's scheduling.
Training goes on from the last complete checkpoint; evaluate and parity_report follow. A run that is still being worked
on is refused. Settings that decide what is learned stay as they are; --set loop.steps=300 adds steps."""
_PROVE = """\
Prove that stopping and continuing changes nothing: one run straight, one killed in every phase of a step.
The process dies at a random moment of the phase, of a timer's signal that nothing handles: a SIGKILL from outside would
miss a phase of milliseconds. Prompts, samples, metrics and final weights must then be equal bit for bit; with another
number of ranks, equal within rounding. Exit 0 proven, 1 not."""


def register(commands: Any) -> None:
    """Add `run` with its commands to the subparsers of `grpo`."""
    run = commands.add_parser("run", help="Continue, prove, explain and compare stored runs.")
    kinds = run.add_subparsers(required=True, metavar="COMMAND")
    resume = kinds.add_parser(
        "resume",
        help=_RESUME.partition("\n")[0],
        description=_RESUME,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    resume.add_argument("run", metavar="RUN", help=_RUN)
    resume.add_argument(
        "--set", action="append", default=[], metavar="KEY.PATH=VALUE", dest="overrides", help="repeatable"
    )
    resume.add_argument("--until", choices=_STAGES, default=_STAGES[-1], help="the last stage that is run")
    resume.set_defaults(command=_resume)
    _register_proof(kinds)
    cli_lineage.register(kinds)


def _register_proof(kinds: Any) -> None:
    prove = kinds.add_parser(
        "prove-resume",
        help=_PROVE.partition("\n")[0],
        description=_PROVE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    prove.add_argument("--recipe", default=default_recipe.__name__, help="named configuration to start from")
    prove.add_argument(
        "--set", action="append", default=[], metavar="KEY.PATH=VALUE", dest="overrides", help="repeatable"
    )
    prove.add_argument(
        "--trainer", choices=TRAINERS, action="append", dest="trainers", help="repeatable; all when absent"
    )
    prove.add_argument(
        "--phase", choices=SPANS, action="append", dest="phases", help="repeatable; every phase of a step when absent"
    )
    prove.add_argument("--same-ranks", action="store_true", help="do not also continue with another number of ranks")
    prove.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="keep runs and logs in this new folder; without it they are kept where nothing was proven",
    )
    prove.add_argument("--json", action="store_true", help="the report as one JSON object instead of text")
    prove.set_defaults(command=_prove_resume)


def _resume(options: argparse.Namespace) -> int:
    from grpo_lib.stages.stored_run import open_run

    run = open_run(options.run)  # before the stages are imported: a mistake in its name costs no second of torch
    _show_log()
    from grpo_lib.parity.report import gate, summary
    from grpo_lib.stages import resume_run

    resumed = resume_run.run(run, overrides=options.overrides, until=resume_run.Stage(options.until))
    if resumed.parity is None or resumed.evaluation is None:
        print(f"{resumed.training.steps} steps are done; the model is in {resumed.training.export}")
        return 0
    print(summary(resumed.parity, resumed.evaluation))
    gate(resumed.parity)
    return 0


def _prove_resume(options: argparse.Namespace) -> int:
    configs = [
        resolve(options.recipe, options.overrides, trainer=trainer)
        for trainer in dict.fromkeys(options.trainers or TRAINERS)
    ]
    _show_log()
    from grpo_lib.parity.report import to_dict
    from grpo_lib.parity.terminal import render_report
    from grpo_lib.stages import prove_resume
    from grpo_lib.types import ParityReport, ParityVerdict

    phases = tuple(dict.fromkeys(options.phases or prove_resume.PHASES))
    folder, is_proven = _new_folder(options.keep), False
    try:
        reports = [
            prove_resume.run(config, folder=folder, phases=phases, other_ranks=not options.same_ranks)
            for config in configs
        ]
        whole = ParityReport(
            checks=tuple(check for report in reports for check in report.checks),
            tables={name: rows for report in reports for name, rows in report.tables.items()},
        )
        report = to_dict(whole)
        print(json.dumps(report) if options.json else render_report(report))
        is_proven = whole.verdict is ParityVerdict.PASS
    finally:
        if options.keep is None:
            _leave(folder, is_proven=is_proven)
    return int(not is_proven)


def _new_folder(kept: Path | None) -> Path:
    if kept is None:
        return Path(tempfile.mkdtemp(prefix="resume-proof-"))
    if kept.exists():
        raise DataError(f"{kept} exists; name a folder that does not, so that runs start from nothing")
    kept.mkdir(parents=True)
    return kept.resolve()


def _leave(folder: Path, *, is_proven: bool) -> None:
    """Runs and logs that nobody asked to keep go when they prove what they should; else they say what went wrong."""
    if is_proven:
        shutil.rmtree(folder)
    else:
        print(f"grpo: runs and logs are in {folder}", file=sys.stderr)


def _show_log() -> None:
    logging.basicConfig(format="%(message)s")
    logging.getLogger("grpo_lib").setLevel(logging.INFO)
