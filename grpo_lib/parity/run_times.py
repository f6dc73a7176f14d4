"""Seconds and rates of two sets of runs, side by side: each span of A against the same span of B, and nothing else.

A ratio is refused where the two sides cut their steps at other places, or ran on other machines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo_lib.config import flat
from grpo_lib.parity import statistics
from grpo_lib.parity.finished_run import WARM_UP_STEPS, FinishedRun, differing, number
from grpo_lib.parity.run_verdicts import spans_check
from grpo_lib.parity.statistics import Ratio
from grpo_lib.parity.verdicts import MetricRow
from grpo_lib.timing import SPANS
from grpo_lib.types import ParityCheck

COMPUTE = ("forward_backward", "optim")  # what the trainer does with a batch that has arrived
_PREFIX, _SUFFIX = "time/", "_s"
_OVERLAPPING = "group_latency_max"  # lies inside other spans
_ROUNDING = 1e-6  # of a step, in which its parts must add up
_REFUSED = Ratio(value=math.nan, low=math.nan, high=math.nan)
# Name → numerator, spans of the denominator; per real token, padding never counts.
_RATES = {
    "trained real tokens per second of compute": ("batch/real_tokens", COMPUTE),
    "sampled tokens per second of waiting": ("response/tokens", ("wait_for_rollouts",)),
    "trained real tokens per second of step": ("batch/real_tokens", ("step",)),
}
# Sections whose settings say how much hardware a run had, or how it used it.
_RESOURCES = ("runtime", "trainer", "rollout", "weight_sync")


def compare_times(
    runs_a: Sequence[FinishedRun], runs_b: Sequence[FinishedRun]
) -> tuple[ParityCheck, dict[str, list[dict[str, Any]]]]:
    """The check that both sides can be compared, and the tables `time` and `throughput`."""
    a, b = runs_a[0], runs_b[0]
    names_a, names_b = ({name for run in runs for name in span_names(run)} for runs in (runs_a, runs_b))
    broken = [f"{run.name} step {row['step']}" for run in (*runs_a, *runs_b) for row in run.rows if not _adds_up(row)]
    machines = [run.lineage.get("machine") for run in (*runs_a, *runs_b)]
    elsewhere = any(machine != machines[0] for machine in machines)
    resources = [key for key in differing(a, b) if key.partition(".")[0] in _RESOURCES]
    values_a, values_b = flat(a.config), flat(b.config)
    warm = [sum(len(run.warm_rows) for run in runs) for runs in (runs_a, runs_b)]
    evidence = [
        f"medians over {warm[0]:,} steps of A and {warm[1]:,} of B, the first {WARM_UP_STEPS} of each run left out; "
        f"intervals from {statistics.MIN_STEPS} steps of a run on"
    ]
    if elsewhere:
        evidence.append(f"the machines differ, so times are not comparable: A {machines[0]}, B {machines[-1]}")
    if resources:
        evidence.append(
            f"other settings: {', '.join(f'{key} {values_a[key]} -> {values_b[key]}' for key in resources)}"
        )
    check = spans_check(
        sorted(names_a - names_b),
        sorted(names_b - names_a),
        broken,
        sum(len(run.rows) for run in (*runs_a, *runs_b)),
        evidence="; ".join(evidence),
    )
    refused = bool(names_a ^ names_b or broken or elsewhere)
    return check, {
        "time": _time_rows(runs_a, runs_b, names_a | names_b, refused=refused),
        "throughput": _rate_rows(runs_a, runs_b, refused=refused),
    }


def span_names(run: FinishedRun) -> set[str]:
    """Spans that a run's rows hold, `other` and `step` among them."""
    return {
        key.removeprefix(_PREFIX).removesuffix(_SUFFIX)
        for row in run.rows
        for key in row
        if key.startswith(_PREFIX) and key.endswith(_SUFFIX)
    }


def _adds_up(row: MetricRow) -> bool:
    step = number(row.get(_key("step")))
    whole = {_key(name) for name in ("step", _OVERLAPPING)}
    parts = sum(number(value) for key, value in row.items() if key.startswith(_PREFIX) and key not in whole)
    return abs(step - parts) <= _ROUNDING * step  # False for NaN


def _key(span: str) -> str:
    return f"{_PREFIX}{span}{_SUFFIX}"


def _time_rows(
    runs_a: Sequence[FinishedRun], runs_b: Sequence[FinishedRun], names: set[str], *, refused: bool
) -> list[dict[str, Any]]:
    """Compute first, then every span, the whole step and what overlaps with the rest."""
    ends = ("other", "step", _OVERLAPPING)
    own = sorted(names - {*SPANS, *ends})  # of another version of this program
    spans: dict[str, tuple[str, ...]] = {"compute = forward_backward + optim": COMPUTE}
    spans |= {name: (name,) for name in (*SPANS, *own) if name in names}
    spans |= {"other": ("other",), "step, end to end": ("step",), "slowest response (overlaps)": (_OVERLAPPING,)}
    rows = []
    for label, parts in spans.items():
        a, b = ([_seconds(run, parts)[:, None] for run in runs] for runs in (runs_a, runs_b))
        ratio = _REFUSED if refused else _ratio(runs_a[0], a, b, _median)
        all_a, all_b = np.concatenate(a), np.concatenate(b)
        rows.append(
            {
                "span": label,
                "a_median_s": float(np.median(all_a)),
                "b_median_s": float(np.median(all_b)),
                "b_over_a": ratio.value,
                "low": ratio.low,
                "high": ratio.high,
                "a_mean_s": float(all_a.mean()),
                "b_mean_s": float(all_b.mean()),
            }
        )
    return rows


def _rate_rows(runs_a: Sequence[FinishedRun], runs_b: Sequence[FinishedRun], *, refused: bool) -> list[dict[str, Any]]:
    rows = []
    for label, (tokens, parts) in _RATES.items():
        a, b = (
            [np.stack([_warm(run, tokens), _seconds(run, parts)], axis=1) for run in runs] for runs in (runs_a, runs_b)
        )
        ratio = _REFUSED if refused else _ratio(runs_a[0], a, b, _rate)
        values = [float(_rate(np.concatenate(side)[None])[0]) for side in (a, b)]
        rows.append(
            {
                "rate": label,
                "a": values[0],
                "b": values[1],
                "b_over_a": ratio.value,
                "low": ratio.low,
                "high": ratio.high,
            }
        )
    return rows


def _ratio(first: FinishedRun, a: Sequence[np.ndarray], b: Sequence[np.ndarray], statistic: Any) -> Ratio:
    config = first.config
    return statistics.ratio_over_steps(
        a,
        b,
        statistic,
        resamples=config.evaluation.bootstrap_resamples,
        seed=config.seed,
        confidence=config.evaluation.confidence,
    )


def _median(steps: np.ndarray) -> np.ndarray:
    return np.median(steps[..., 0], axis=1)


def _rate(steps: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):  # a run that never waited has no rate
        return steps[..., 0].sum(axis=1) / steps[..., 1].sum(axis=1)


def _warm(run: FinishedRun, metric: str) -> np.ndarray:
    return np.nan_to_num([number(row.get(metric)) for row in run.warm_rows])


def _seconds(run: FinishedRun, spans: Sequence[str]) -> np.ndarray:
    return np.sum([[number(row.get(_key(span))) for row in run.warm_rows] for span in spans], axis=0)
