"""Nights of the parity gate, and values that leave the band of the nights before: a warning before a failure.

Every check passes while its value is at most its tolerance, so only a rise is a drift. On a logarithmic scale, because
distances vary by factors and not by amounts, a value drifts above

    median + max(5 x 1.4826 x MAD, log 2)

of the nights before it. Median and MAD (median absolute deviation; times 1.4826 it estimates a normal standard
deviation) do not follow one odd night. The doubling is what another order of summation may do to a rounding distance:
identical nights have a MAD of 0. Values below the rounding of fp32 count as that rounding.

With fewer than 5 nights there is no band. The simulation in tests/unit/test_parity_history.py bounds the false alarms
per value: below 1 in 1000 where nights scatter by 20 %; where they scatter by 50 %, 1 in 300 with 14 nights and 1 in
40 with 5. A lasting rise is flagged until it is the median, that is for about half of `parity.history_nights` nights; a
slow one may stay inside a band that moves along, and is then left to the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from grpo_lib.types import ParityVerdict

LEAST_NIGHTS = 5
ROUNDING = 2.0**-24  # half a unit in the last place of an fp32 number near 1
_SPREADS = 5.0
_MAD_TO_SD = 1.4826
_LEAST_FACTOR = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NightlyCheck:
    """One check of a nightly report; `value` is None where it was no finite number."""

    name: str
    verdict: ParityVerdict
    value: float | None
    tolerance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Night:
    """One nightly report, as a line of the history file."""

    date: str  # ISO 8601, UTC
    run_id: str
    recipe: str
    model_sha256: str
    trainers: tuple[str, ...]
    workload: str  # sha256 of the settings that decide what is computed
    commit: str | None
    packages: Mapping[str, str | None]
    verdict: ParityVerdict
    checks: tuple[NightlyCheck, ...]
    seconds: Mapping[str, float]  # by span

    @property
    def series(self) -> tuple[str, str, tuple[str, ...], str]:
        """Nights with the same one measured the same thing."""
        return self.recipe, self.model_sha256, self.trainers, self.workload


class DriftState(StrEnum):
    """`DRIFT` is a warning: it never changes a verdict."""

    STEADY = "steady"
    DRIFT = "DRIFT"
    TOO_FEW_NIGHTS = "not enough nights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """One value tonight against the nights before; median and limit are NaN without a band."""

    check: str
    state: DriftState
    value: float | None
    median: float
    limit: float  # the upper end of the band
    tolerance: float
    num_nights: int  # that the band is made of


def comparable(tonight: Night, past: Sequence[Night], *, most: int) -> list[Night]:
    """The last `most` other nights that measured the same thing, oldest first; a run that was repeated counts once."""
    last = {night.run_id: night for night in past if night.series == tonight.series}
    last.pop(tonight.run_id, None)
    return sorted(last.values(), key=lambda night: night.date)[-most:]


def drifts(tonight: Night, past: Sequence[Night]) -> list[Drift]:
    """Every value of tonight that has room to drift, the farthest above its band first.

    A check whose tolerance is 0 has none: it passes or fails. Values that failed are no part of a band.

    Args:
        past: From `comparable`.
    """
    found = []
    for check in tonight.checks:
        if check.tolerance <= 0:
            continue
        before = [
            other.value
            for night in past
            for other in night.checks
            if other.name == check.name and other.verdict is not ParityVerdict.FAIL and other.value is not None
        ]
        found.append(_drift(check, before))
    return sorted(found, key=_excess, reverse=True)


def _drift(check: NightlyCheck, before: Sequence[float]) -> Drift:
    state, median, limit = DriftState.TOO_FEW_NIGHTS, math.nan, math.nan
    if len(before) >= LEAST_NIGHTS:
        logs = np.log(np.maximum(before, ROUNDING))
        middle = float(np.median(logs))
        spread = _MAD_TO_SD * float(np.median(np.abs(logs - middle)))
        median, limit = math.exp(middle), math.exp(middle + max(_SPREADS * spread, math.log(_LEAST_FACTOR)))
        state = DriftState.DRIFT if check.value is None or check.value > limit else DriftState.STEADY
    return Drift(
        check=check.name,
        state=state,
        value=check.value,
        median=median,
        limit=limit,
        tolerance=check.tolerance,
        num_nights=len(before),
    )


def _excess(drift: Drift) -> float:
    """How many times its limit a value is; a value that is no number is above every limit, one without a band last."""
    if drift.state is DriftState.TOO_FEW_NIGHTS:
        return -1.0
    return math.inf if drift.value is None else drift.value / drift.limit


def drift_rows(found: Sequence[Drift]) -> list[dict[str, object]]:
    """Rows of a report's `drift` table, plain values; what is not known is None."""
    return [
        {
            "state": str(drift.state),
            "check": drift.check,
            "value": drift.value,
            "median": _known(drift.median),
            "limit": _known(drift.limit),
            "tolerance": drift.tolerance,
            "nights": drift.num_nights,
        }
        for drift in found
    ]


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def drift_lines(found: Sequence[Drift]) -> list[str]:
    """For a terminal: one line in all, and one for each value that left its band."""
    judged = [drift for drift in found if drift.state is not DriftState.TOO_FEW_NIGHTS]
    if not judged:
        nights = max((drift.num_nights for drift in found), default=0)
        return [f"drift: not enough nights for a band ({nights} of {LEAST_NIGHTS})"]
    flagged = [drift for drift in judged if drift.state is DriftState.DRIFT]
    nights = max(drift.num_nights for drift in judged)
    lines = [f"drift: {len(flagged)} of {len(judged)} values are above the band of the last {nights} nights"]
    lines += [
        f"  {drift.check}: {_figure(drift.value)}, median {_figure(drift.median)}, band up to {_figure(drift.limit)}, "
        f"tolerance {_figure(drift.tolerance)}"
        for drift in flagged
    ]
    return lines


def _figure(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"
