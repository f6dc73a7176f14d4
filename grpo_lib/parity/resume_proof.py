"""A run that was killed and continued against one that was not: the same prompts, samples, metrics and weights.

On one machine in fp32 nothing may differ by a single bit. With another number of ranks sums are taken in another order;
then the first step must agree within rounding, and later ones within the noise of the trainer against itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_lib.config import ParityConfig
from grpo_lib.parity.finished_run import number
from grpo_lib.parity.verdicts import check, listed
from grpo_lib.types import ParityCheck

FIRST_STEP_TOLERANCE = 1e-5  # relative, or absolute below 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProvenRun:
    """What one run left, as far as the proof needs it."""

    rows: Sequence[Mapping[str, Any]]  # computed metrics in the order of the file, times and rates left out
    prompts: Sequence[Hashable]  # drawn, one entry per visit
    samples: Sequence[Hashable]  # ids, seeds and token ids
    certified: Sequence[tuple[int, str]]  # (policy version, checksum) of every push, in order
    weights: Mapping[str, str]  # final weights: tensor name → sha256


def same_run_checks(
    name: str, straight: ProvenRun, continued: ProvenRun, *, restored: Sequence[int]
) -> list[ParityCheck]:
    """Bit for bit.

    Args:
        name: Of the pair, for the checks' names.
        restored: Policy version of the checkpoint that each resume continued from.
    """
    return [
        _steps(name, straight, continued),
        _multiset(f"{name}: prompts", "visits", straight.prompts, continued.prompts),
        _multiset(f"{name}: samples", "samples", straight.samples, continued.samples),
        _metrics(name, straight, continued),
        _versions(name, straight, continued),
        _restored(name, straight, continued, restored),
        _weights(name, straight, continued),
    ]


def _steps(name: str, straight: ProvenRun, continued: ProvenRun) -> ParityCheck:
    expected = [row["step"] for row in straight.rows]
    found = [row["step"] for row in continued.rows]
    missing, extra = Counter(expected) - Counter(found), Counter(found) - Counter(expected)
    wrong = missing.total() + extra.total() + (not missing and not extra and found != expected)
    return check(
        f"{name}: one row per step",
        wrong,
        0,
        num_observations=len(expected),
        needed=1,
        evidence=f"missing: {listed(sorted(map(str, missing)))}; twice: {listed(sorted(map(str, extra)))}",
    )


def _multiset(name: str, unit: str, a: Sequence[Hashable], b: Sequence[Hashable]) -> ParityCheck:
    counts_a, counts_b = Counter(a), Counter(b)
    apart = (counts_a - counts_b).total() + (counts_b - counts_a).total()
    return check(
        name, apart, 0, num_observations=len(a), needed=1, evidence=f"{len(a):,} {unit}; {apart:,} not in both"
    )


def _metrics(name: str, straight: ProvenRun, continued: ProvenRun) -> ParityCheck:
    pairs = [
        (row["step"], key, row.get(key), other.get(key))
        for row, other in zip(straight.rows, continued.rows, strict=False)
        for key in {**row, **other}
    ]
    apart = [f"{key} at step {step}: {a} and {b}" for step, key, a, b in pairs if a != b]
    return check(
        f"{name}: metrics, bit for bit",
        len(apart),
        0,
        num_observations=len(pairs),
        needed=1,
        evidence=f"{len(pairs):,} values, all but times and rates; apart: {listed(apart[:3])}",
    )


def _versions(name: str, straight: ProvenRun, continued: ProvenRun) -> ParityCheck:
    sent = dict(straight.certified)
    apart = [f"v{version}" for version, checksum in continued.certified if sent.get(version) != checksum]
    unsent = [f"v{version}" for version in sent.keys() - dict(continued.certified).keys()]
    return check(
        f"{name}: weights sent, by version",
        len(apart) + len(unsent),
        0,
        num_observations=len(continued.certified),
        needed=1,
        evidence=f"{len(continued.certified)} pushes; other weights than in the straight run: {listed(apart)}",
    )


def _restored(name: str, straight: ProvenRun, continued: ProvenRun, restored: Sequence[int]) -> ParityCheck:
    """Each resume sends the checkpoint's version once more, before it asks for a rollout."""
    more = Counter(version for version, _ in continued.certified) - Counter(
        version for version, _ in straight.certified
    )
    apart = (Counter(restored) - more).total() + (more - Counter(restored)).total()
    return check(
        f"{name}: first push of each resume",
        apart,
        0,
        num_observations=len(restored),
        needed=1,
        evidence=f"versions restored: {listed([f'v{version}' for version in restored])}",
    )


def _weights(name: str, straight: ProvenRun, continued: ProvenRun) -> ParityCheck:
    names = straight.weights.keys() | continued.weights.keys()
    apart = sorted(key for key in names if straight.weights.get(key) != continued.weights.get(key))
    return check(
        f"{name}: final weights, bit for bit",
        len(apart),
        0,
        num_observations=len(names),
        needed=1,
        evidence=f"{len(names)} tensors; apart: {listed(apart)}",
    )


def other_ranks_checks(
    name: str,
    *,
    straight: ProvenRun,
    other: ProvenRun,
    first_step: int,
    distance: float,
    noise: float,
    config: ParityConfig,
) -> list[ParityCheck]:
    """Continued with another number of ranks.

    Args:
        first_step: The first that was computed with the other number.
        distance: Relative L2 distance of the final weights from the straight run's.
        noise: The same for the trainer against itself, with another micro-batch split from that step on. Where that
            gave the same bits, there is nothing to take a multiple of, and one step's rounding is the limit.
    """
    row, reference = (_row(run, first_step) for run in (other, straight))
    deviations = {
        key: abs(number(row.get(key)) - number(value)) / max(1.0, abs(number(value)))
        for key, value in reference.items()
        if value is not None or row.get(key) is not None
    }
    worst = max(deviations, key=lambda key: (math.isnan(deviations[key]), deviations[key]))
    apart = (Counter(straight.samples) - Counter(other.samples)).total()
    return [
        check(
            f"{name}: first step",
            deviations[worst],
            FIRST_STEP_TOLERANCE,
            num_observations=len(deviations),
            needed=1,
            evidence=f"{len(deviations)} metrics of step {first_step}; largest deviation: {worst}",
        ),
        check(
            f"{name}: final weights",
            # A token that rounding flipped changes what is learned from then on: nothing follows from the distance.
            math.nan if apart else distance,
            config.noise_factor * noise or config.replay_relative,
            num_observations=0 if apart else len(other.rows),
            needed=1,
            evidence=f"distance {distance:.2g}, of the trainer with itself {noise:.2g}; samples that differ: {apart:,}",
        ),
    ]


def _row(run: ProvenRun, step: int) -> Mapping[str, Any]:
    return next(row for row in run.rows if row["step"] == step)
