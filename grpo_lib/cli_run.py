"""`grpo run`: continue a stopped run, prove that continuing changes nothing, ask where a number comes from.

Exit codes of `resume` are those of the run: 0 fine, 1 its parity report is a FAIL or a part failed, 2 the command is
wrong or the run cannot be read. `prove-resume`: 0 proven, 1 not.
"""

from __future__ import annotations

import argparse
import logging
from typing import Any

from grpo_lib import cli_lineage

_RUN = "a run's folder, or its Metaflow id such as GRPOFlow/123 or 123"
_STAGES = ("fit", "evaluate", "parity_report")
_RESUME = """\
Continue a stopped run in its own folder, without Metaflow's scheduling.
Training goes on from the last complete checkpoint; evaluate and parity_report follow. A run that is still being worked
on is refused. Settings that decide what is learned stay as they are; --set loop.steps=300 adds steps."""


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
    cli_lineage.register(kinds)


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


def _show_log() -> None:
    logging.basicConfig(format="%(message)s")
    logging.getLogger("grpo_lib").setLevel(logging.INFO)
