"""The table of docs/parity.md: every mistake, its verdict, and where bisect pointed.

python -m tests.parity.sabotage_table
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from grpo_lib.types import ParityVerdict
from tests.distributed.gloo_ranks import RankPool
from tests.parity.cases import CASES, Case
from tests.parity.engine_lab import ENGINE_CASES, EngineCase, engine_lab
from tests.parity.lab import Lab, Outcome

_HEADER = ("mistake", "made in", "verdict", "failed checks", "cause named", "bisect points at")


def rows(folder: Path) -> Iterator[Sequence[str]]:
    """Run every case, those of the engine last."""
    torch.set_num_threads(1)
    pools: list[RankPool] = []

    def pool() -> RankPool:
        if not pools:
            pools.append(RankPool(2))
        return pools[0]

    try:
        lab = Lab(folder, pool)
        for case in CASES:
            yield row(case, case.run(lab))
    finally:
        for started in pools:
            started.close()
    with engine_lab(folder) as engine:
        for case in ENGINE_CASES:
            yield row(case, case.run(engine))


def row(case: Case | EngineCase, outcome: Outcome) -> Sequence[str]:
    """What came out, whether or not it is what the case expects; the tests say that."""
    failed = [check.name for check in outcome.report.checks if check.verdict is ParityVerdict.FAIL]
    return (
        case.name,
        case.made_in,
        str(outcome.report.verdict),
        ", ".join(dict.fromkeys(map(_short, failed))) or "none",
        "<br>".join(f"{finding.cause} ({finding.subject})" for finding in outcome.diagnosis.findings) or "none",
        "<br>".join(finding.where for finding in outcome.diagnosis.findings) or "nothing",
    )


def _short(check: str) -> str:
    """Without the pair that was compared: several pairs fail alike."""
    name = re.sub(r"^(lockstep|[\w ]+ vs [\w ]+): ", "", check)
    return re.sub(r", [\w ]+( vs [\w ]+| \([ab]\)| on stored tokens)$", "", name).replace("|", "\\|")


def merged(found: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """Neighbours that differ in where the mistake was made only, as one row."""
    result: list[Sequence[str]] = []
    for name, made_in, *rest in found:
        if result and (result[-1][0], *result[-1][2:]) == (name, *rest):
            result[-1] = (name, f"{result[-1][1]}; {made_in}", *rest)
        else:
            result.append((name, made_in, *rest))
    return result


def main() -> None:
    write = sys.stdout.write
    with TemporaryDirectory() as folder:
        table = merged(list(rows(Path(folder))))
    write(f"| {' | '.join(_HEADER)} |\n|{'---|' * len(_HEADER)}\n")
    for columns in table:
        write(f"| {' | '.join(columns)} |\n")


if __name__ == "__main__":
    main()
