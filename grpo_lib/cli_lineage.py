"""`grpo run explain`, `grpo run diff` and `grpo run replay-step`: where a stored number comes from.

Exit codes: 0 all links hold, nothing differs, or the step agrees; 1 not so; 2 the command is wrong or a run unreadable.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

_RUN = "a run's folder, or its Metaflow id such as GRPOFlow/123 or 123"
_EXPLAIN = """\
Print the chain from a step's metrics back to its rollouts, weights, data, model, code and machine.
Each link says whether it was checked now (hashed or computed again), is only stated by the run, or is BROKEN."""
_DIFF = """\
Print what differs between two runs, and nothing else: settings, packages, machine, data, and the first rollouts,
weights and metrics that part. Times and rates are left out. Exit 1 when anything differs, as diff does."""
_REPLAY = """\
Compute one training step again, from the stored rollouts and the newest checkpoint before it (or the base model, and
the steps in between), with the run's own trainer. Says whether metrics and weights are those that were recorded."""


def register(commands: Any) -> None:
    """Add the commands to the sub-parsers of `grpo run`."""

    def add(name: str, command: Any, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name,
            help=text.partition("\n")[0].rstrip("."),
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.add_argument("--json", action="store_true", help="one JSON object instead of text")
        added.set_defaults(command=command)
        return added

    explain = add("explain", _explain, _EXPLAIN)
    explain.add_argument("run", metavar="RUN", help=_RUN)
    explain.add_argument("step", metavar="STEP", type=int, nargs="?", help="the last one when absent")
    diff = add("diff", _diff, _DIFF)
    diff.add_argument("run_a", metavar="RUN_A", help=_RUN)
    diff.add_argument("run_b", metavar="RUN_B", help=_RUN)
    replay = add("replay-step", _replay_step, _REPLAY)
    replay.add_argument("run", metavar="RUN", help=_RUN)
    replay.add_argument("step", metavar="STEP", type=int)
    replay.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        help="largest relative difference of a metric that still agrees; 0, the default, also wants equal weights: "
        "right on the same machine in fp32 on CPU, too strict for a GPU",
    )


def _explain(options: argparse.Namespace) -> int:
    from grpo_lib.stages.stored_run import open_run

    run = open_run(options.run)
    from grpo_lib.stages import explain

    links = explain.run(run, options.step)
    if options.json:
        print(json.dumps([asdict(link) for link in links]))
    else:
        _print_columns([(link.what, str(link.state), link.text) for link in links])
    return int(any(link.state is explain.LinkState.BROKEN for link in links))


def _diff(options: argparse.Namespace) -> int:
    from grpo_lib.stages.stored_run import open_run

    run_a, run_b = open_run(options.run_a), open_run(options.run_b)
    from grpo_lib.stages import run_diff

    differences = run_diff.run(run_a, run_b)
    if options.json:
        print(json.dumps([asdict(difference) for difference in differences]))
        return int(bool(differences))
    section = None
    for difference in differences:
        if difference.section != section:
            section = difference.section
            print(f"{section}:")
        print(f"  {difference.what}", f"    a: {difference.a}", f"    b: {difference.b}", sep="\n")
    return int(bool(differences))


def _replay_step(options: argparse.Namespace) -> int:
    from grpo_lib.stages.stored_run import open_run

    run = open_run(options.run)
    from grpo_lib.stages import replay_step

    replayed = replay_step.run(run, options.step)
    agrees = replayed.agrees(options.tolerance)
    if options.json:
        print(json.dumps({**asdict(replayed), "weights_equal": replayed.weights_equal, "agrees": agrees}))
        return int(not agrees)
    print(f"step {replayed.step}, from {replayed.start} in {replayed.steps_taken} step(s)")
    _print_columns(
        [("metric", "recorded", "replayed", "relative difference")]
        + [(m.name, f"{m.recorded:.9g}", f"{m.replayed:.9g}", f"{m.relative:.2g}") for m in replayed.metrics]
    )
    equal = "equal" if replayed.weights_equal else f"DIFFERENT: recorded {replayed.recorded_weights}"
    print(f"weights after the step: {replayed.replayed_weights}, {equal}")
    print("AGREES" if agrees else f"DOES NOT AGREE within {options.tolerance:g}")
    return int(not agrees)


def _print_columns(rows: Sequence[tuple[str, ...]]) -> None:
    """All columns but the last aligned."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]) - 1)]
    for row in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]))
