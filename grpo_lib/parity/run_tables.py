"""Tables of a comparison of runs: settings, metrics with their spread over seeds, curves, and what each cannot show."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from grpo_lib.config import flat
from grpo_lib.parity import statistics
from grpo_lib.parity.finished_run import FinishedRun, differing
from grpo_lib.parity.report import LIMITS

CURVES = (
    "reward/correct_rate", "reward/mean", "response/len_mean", "response/truncated", "loss/policy", "optim/grad_norm",
    "policy/entropy", "mismatch/k3",
)  # fmt: skip
# Metric → what a step's value is weighted by in the mean over steps; None counts every step once.
_METRICS: dict[str, str | None] = {
    "mismatch/tis_clipfrac": "batch/trained_tokens",
    "mismatch/tis_ratio": "batch/trained_tokens",
    "mismatch/abs_mean": "batch/trained_tokens",
    "mismatch/k3": "batch/trained_tokens",
    "policy/clipfrac": "batch/trained_tokens",
    "policy/entropy": "batch/trained_tokens",
    "loss/policy": "batch/trained_tokens",
    "advantage/max": None,
    "optim/grad_norm": None,
    "reward/correct_rate": None,
    "reward/correct_rate_kept": None,
    "response/len_mean": None,
    "response/truncated": None,
}
_RUN_LIMITS = {
    "mismatch/tis_ratio": "A mean of weights that are near 1 for any working pair: it moves only when something is "
    "grossly wrong.",
    "advantage/max": "Set by the rewards of the luckiest sample of a step, so it compares samples and not trainers.",
    "loss/policy": "Its size depends on advantages and lengths, and a lower surrogate is not a better policy: with one "
    "step per batch its gradient counts, not its value.",
    "learning curves": "Bands are t intervals over seeds at one step each; that they overlap everywhere proves no "
    "equality. The equivalence tests do, within their margin.",
    "equal rates": "A test that rejects nothing shows no equality. The interval of the ratio says how far apart the "
    "rates may be.",
    "machine": "As the start step saw it; on a cluster the trainer's pool is another one.",
}


def limits() -> list[dict[str, str]]:
    """What the numbers of a comparison of runs cannot show."""
    shown = ("tis_clipfrac", "policy/clipfrac", "reward/correct_rate_kept", "time", "pass@1")
    every = {**{name: LIMITS[name] for name in shown}, **_RUN_LIMITS}
    return [{"metric": metric, "cannot_show": text} for metric, text in every.items()]


def setting_rows(a: FinishedRun, b: FinishedRun, *, allowed: Callable[[str], bool]) -> list[dict[str, Any]]:
    """Settings that differ, and what differs in where the two sides come from."""
    values_a, values_b = flat(a.config), flat(b.config)
    rows = [
        {"what": key, "a": str(values_a[key]), "b": str(values_b[key]), "allowed": "yes" if allowed(key) else "NO"}
        for key in differing(a, b)
    ]
    origin_a, origin_b = _origin(a), _origin(b)
    rows += [
        {"what": key, "a": origin_a.get(key, "–"), "b": origin_b.get(key, "–"), "allowed": "yes"}
        for key in sorted(origin_a.keys() | origin_b.keys())
        if origin_a.get(key) != origin_b.get(key)
    ]
    return rows


def _origin(run: FinishedRun) -> dict[str, str]:
    """The lineage as one level of text, without what has checks of its own."""
    plain: dict[str, str] = {}
    for name, value in run.lineage.items():
        if isinstance(value, dict):
            plain.update({f"{name}.{key}": str(inner) for key, inner in value.items()})
        else:
            plain[name] = str(value)
    return {key: value for key, value in plain.items() if key != "model_sha256" and not key.startswith("seeds.")}


def metric_rows(runs_a: Sequence[FinishedRun], runs_b: Sequence[FinishedRun]) -> list[dict[str, Any]]:
    """Mean over all steps and seeds; the difference with Welch's 95 % interval over seeds."""
    rows = []
    for metric, weight in _METRICS.items():
        a, b = ([_mean(run, metric, weight) for run in runs] for runs in (runs_a, runs_b))
        found = statistics.welch(a, b)
        rows.append(
            {
                "metric": metric,
                "a": float(np.mean(a)),
                "b": float(np.mean(b)),
                "b_minus_a": found.difference,
                "low": found.low,
                "high": found.high,
                "p_equal": statistics.equal_means_p(a, b),
            }
        )
    return rows


def _mean(run: FinishedRun, metric: str, weight: str | None) -> float:
    values = run.series(metric)
    weights = np.ones(len(values)) if weight is None else np.nan_to_num(run.series(weight))
    seen = np.isfinite(values) & (weights > 0)
    return float(np.average(values[seen], weights=weights[seen])) if seen.any() else math.nan


def smoothing_window(num_steps: int) -> int:
    """Steps that a point of a curve is the mean of: a twentieth."""
    return max(1, num_steps // 20)


def curve_rows(side: str, runs: Sequence[FinishedRun]) -> list[dict[str, Any]]:
    """Smoothed mean over seeds with its 95 % t interval, by metric and step."""
    num_steps = min(len(run.rows) for run in runs)
    window = smoothing_window(num_steps)
    rows = []
    for metric in CURVES:
        curves = np.stack([statistics.smoothed(run.series(metric)[:num_steps], window) for run in runs])
        bands = zip(*(values.tolist() for values in statistics.band(curves)), strict=True)
        rows += [
            {"metric": metric, "side": side, "step": step, "mean": mean, "low": low, "high": high, "window": window}
            for step, (mean, low, high) in enumerate(bands, start=1)
        ]
    return rows
