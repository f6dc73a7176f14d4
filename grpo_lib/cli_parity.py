"""`grpo parity`: stored runs in, a verdict out. The stage functions do the work and load what it needs.

Exit codes: 0 PASS, 1 FAIL, 3 INCONCLUSIVE; 2 when there is no verdict, because the command is wrong, a run cannot be
read, or a part failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_lib.config import TRAINERS, with_overrides
from grpo_lib.errors import ConfigError, GrpoError
from grpo_lib.types import ParityVerdict

if TYPE_CHECKING:
    from grpo_lib.stages.stored_run import StoredRun

NO_VERDICT = 2
EXIT_CODES: Mapping[str, int] = {ParityVerdict.PASS: 0, ParityVerdict.FAIL: 1, ParityVerdict.INCONCLUSIVE: 3}
MODES = ("lockstep", "free")
_SETTINGS = "parity."

_RUN = "a run's folder, or its Metaflow id such as GRPOFlow/123 or 123"
_RUNS = f"{_RUN}; several seeds of one set-up with commas between them"
_DESCRIPTION = "Compare stored runs, trainers and engines; exit 0 PASS, 1 FAIL, 3 INCONCLUSIVE, 2 no verdict."

Report = dict[str, Any]  # `parity.report.to_dict`


def register(commands: Any) -> None:
    """Add `parity` with its commands to the subparsers of `grpo`."""
    parity = commands.add_parser("parity", help=_DESCRIPTION, description=_DESCRIPTION)
    kinds = parity.add_subparsers(required=True, metavar="COMMAND")
    common = _common_options()

    def add(name: str, command: Callable[[argparse.Namespace], Report], text: str, *examples: str):
        added = kinds.add_parser(
            name,
            help=text.partition(".")[0] + ".",
            description=text,
            epilog="\n".join(("examples:", *(f"  grpo parity {name} {example}" for example in examples))),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            parents=[common],
        )
        added.set_defaults(command=lambda options: _judge(name, command, options))
        return added

    probe = add(
        "probe",
        _probe,
        "Score the same stored tokens with the engine, the trainers and a plain forward.\n"
        "The weights are the run's exported ones and stay as they are; every pair of scorers is compared.",
        "runs/GRPOFlow/123",
        "123 --trainer olmo_core --set parity.min_tokens=5000",
    )
    _run_options(probe)

    replay = add(
        "replay",
        _replay,
        "Train on a run's stored rollouts again, with two trainers side by side.\n"
        "lockstep starts every step of both from the same weights and optimiser state; free lets each go its way and\n"
        "measures them against one trainer with itself under another micro-batch split. A FAIL is bisected.",
        "runs/GRPOFlow/123",
        "123 --mode lockstep --steps 5 --html replay.html",
    )
    _run_options(replay)
    replay.add_argument("--steps", type=_positive, metavar="N", help="stored steps; parity.replay_steps when absent")
    replay.add_argument("--mode", choices=MODES, action="append", dest="modes", help="repeatable; both when absent")

    compare = add(
        "compare",
        _compare,
        "Compare two finished runs, or two set-ups with several seeds each.\n"
        "Learning curves, held-out accuracy, counts, and the time of each span; nothing is run again.",
        "runs/GRPOFlow/123 runs/GRPOFlow/124",
        "11,12,13 21,22,23 --html compare.html",
        "11,12,13 21,22,23 --differs trainer.learning_rate",
    )
    _compare_options(compare)

    bisect = add(
        "bisect",
        _bisect,
        "Find the first layer, document, position or weight version where two scorers part.",
        "runs/GRPOFlow/123 --a olmo_core --b hf_deepspeed",
        "123 --a olmo_core --b hf --step 7",
    )
    _bisect_options(bisect)


def _common_options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--json", action="store_true", help="the report as one JSON object instead of text")
    options.add_argument("--html", type=Path, metavar="FILE", help="write the report as a page too")
    options.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="parity.KEY=VALUE",
        dest="overrides",
        help="tolerance or amount of evidence in place of the run's own; repeatable",
    )
    return options


def _run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=_RUN)
    parser.add_argument(
        "--trainer", choices=TRAINERS, action="append", dest="trainers", help="repeatable; all when absent"
    )


def _compare_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs_a", metavar="RUN_A", help=_RUNS)
    parser.add_argument("runs_b", metavar="RUN_B", help="the same for the other side")
    parser.add_argument(
        "--differs",
        action="append",
        default=[],
        metavar="KEY.PATH",
        help="setting that is meant to differ between A and B; repeatable",
    )


def _bisect_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=_RUN)
    parser.add_argument("--a", required=True, metavar="SCORER", help=f"{', '.join(TRAINERS)}, engine or hf")
    parser.add_argument("--b", required=True, metavar="SCORER", help="the scorer to compare it with")
    parser.add_argument("--step", type=_positive, metavar="N", help="step whose rollouts are scored")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def _judge(name: str, command: Callable[[argparse.Namespace], Report], options: argparse.Namespace) -> int:
    """Run a command, show its report, and turn the verdict into the exit code."""
    try:
        report = command(options)
        if options.html is not None:
            _write_page(options.html, report, title=f"grpo parity {name}")
    except GrpoError as error:
        problems = error.problems if isinstance(error, ConfigError) else str(error).splitlines()
        print("grpo parity: no verdict:", *(f"  - {problem}" for problem in problems), sep="\n", file=sys.stderr)
        return NO_VERDICT
    if options.json:
        text = json.dumps(report)
    else:
        from grpo_lib.parity.terminal import render_report

        text = render_report(report)
    try:
        print(text, flush=True)
    except BrokenPipeError:  # its reader, such as head, has seen enough; Python would complain again when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_CODES[report["verdict"]]


def _write_page(path: Path, report: Report, *, title: str) -> None:
    from grpo_lib.data.files import whole_file
    from grpo_lib.parity.html import page

    with whole_file(path, setting="--html") as scratch:
        scratch.write_text(page(report, title=title), encoding="utf-8")


def _open(reference: str, overrides: Sequence[str]) -> StoredRun:
    """A run under the tolerances that the command line asks for.

    Raises:
        ConfigError: an override is malformed, or is of what the run was made with.
    """
    from grpo_lib.stages.stored_run import open_run

    foreign = [text for text in overrides if not text.strip().startswith(_SETTINGS)]
    if foreign:
        raise ConfigError(
            [f"--set {text}: a stored run keeps its settings; only parity.* can be set" for text in foreign]
        )
    run = open_run(reference)
    return replace(run, config=with_overrides(run.config, overrides))


def _open_side(references: str, overrides: Sequence[str]) -> list[StoredRun]:
    return [_open(reference.strip(), overrides) for reference in references.split(",")]


# A run is opened before the stage is imported: a mistake in its name costs no second of torch.


def _probe(options: argparse.Namespace) -> Report:
    run = _open(options.run, options.overrides)
    from grpo_lib.stages import parity_probe

    return parity_probe.run(run, trainers=_chosen(options.trainers, TRAINERS))


def _replay(options: argparse.Namespace) -> Report:
    run = _open(options.run, options.overrides)
    from grpo_lib.stages import parity_bisect, parity_replay

    trainers, modes = _chosen(options.trainers, TRAINERS), _chosen(options.modes, MODES)
    report = parity_replay.run(run, trainers=trainers, steps=options.steps, modes=modes)
    return parity_bisect.with_causes(report, parity_bisect.causes_of(report, run, trainers=trainers))


def _compare(options: argparse.Namespace) -> Report:
    runs_a, runs_b = (_open_side(side, options.overrides) for side in (options.runs_a, options.runs_b))
    from grpo_lib.stages import parity_compare

    return parity_compare.run(runs_a, runs_b, differs=options.differs)


def _bisect(options: argparse.Namespace) -> Report:
    run = _open(options.run, options.overrides)
    from grpo_lib.stages import parity_bisect

    return parity_bisect.run(run, a=options.a, b=options.b, step=options.step)


def _chosen(named: Sequence[str] | None, every: Sequence[str]) -> tuple[str, ...]:
    """What the user named, each once and in that order; everything where nothing was named."""
    return tuple(dict.fromkeys(named or every))
