"""Statistics of finished runs: equivalence over seeds, accuracy over prompts, counts, and times over steps.

What is drawn again decides what an interval speaks about. Runs with other seeds, prompts, events and steps are four
different questions, and no function here answers two of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from grpo_lib.parity.probe import poisson_interval

POWER = 0.8  # that a least detectable margin is stated for
MIN_STEPS = 20  # of a run; the blocks of fewer steps say nothing about their spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Welch:
    """Difference of two means of independent values with unequal variances."""

    difference: float  # mean of b minus mean of a
    standard_error: float  # NaN with fewer than two values on a side
    degrees: float  # Welch and Satterthwaite's; NaN where the standard error is 0 or NaN
    low: float  # interval of the confidence asked for; unbounded where the standard error is NaN
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalence:
    """Two one-sided tests (Schuirmann 1987) of |difference| < margin, on means with unequal variances.

    Both reject at level alpha exactly when the 1 - 2 alpha interval lies inside the margin.
    """

    difference: float  # mean of b minus mean of a
    low: float  # of the 1 - 2 alpha interval; unbounded with fewer than two values on a side
    high: float
    p_value: float  # the larger of the two
    margin: float
    power: float  # probability to show equivalence with these spreads were the true difference 0
    detectable_margin: float  # smallest margin for which that probability is `POWER`


@dataclass(frozen=True, slots=True, kw_only=True)
class CountComparison:
    """Two event counts with their exposures, e.g. clipped tokens of all tokens."""

    count_a: int
    exposure_a: int
    low_a: float  # exact Poisson interval of the rate, 95 %
    high_a: float
    count_b: int
    exposure_b: int
    low_b: float
    high_b: float
    rate_ratio: float  # b over a; NaN without events in a
    ratio_low: float  # exact, 95 %
    ratio_high: float
    p_value: float  # two-sided, of equal rates

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A statistic of b over the same statistic of a; NaN where that of a is 0."""

    value: float
    low: float
    high: float


def welch(a: Sequence[float], b: Sequence[float], *, confidence: float = 0.95) -> Welch:
    """Difference of means with its interval; equal values on both sides give an interval of no width."""
    difference = float(np.mean(b) - np.mean(a)) if len(a) and len(b) else math.nan
    if min(len(a), len(b)) < 2:
        return Welch(difference=difference, standard_error=math.nan, degrees=math.nan, low=-math.inf, high=math.inf)
    part_a, part_b = float(np.var(a, ddof=1)) / len(a), float(np.var(b, ddof=1)) / len(b)
    error = math.sqrt(part_a + part_b)
    if error == 0:
        return Welch(difference=difference, standard_error=0.0, degrees=math.nan, low=difference, high=difference)
    degrees = (part_a + part_b) ** 2 / (part_a**2 / (len(a) - 1) + part_b**2 / (len(b) - 1))
    reach = float(stats.t.ppf((1 + confidence) / 2, degrees)) * error
    return Welch(
        difference=difference,
        standard_error=error,
        degrees=degrees,
        low=difference - reach,
        high=difference + reach,
    )


def equal_means_p(a: Sequence[float], b: Sequence[float]) -> float:
    """Two-sided p-value of Welch's test of equal means; NaN with fewer than two values on a side."""
    found = welch(a, b)
    if math.isnan(found.standard_error):
        return math.nan
    if found.standard_error == 0:
        return float(found.difference == 0)
    return float(2 * stats.t.sf(abs(found.difference) / found.standard_error, found.degrees))


def equivalence(a: Sequence[float], b: Sequence[float], *, margin: float, alpha: float = 0.05) -> Equivalence:
    """Whether the means of a and b differ by less than `margin`.

    Power is that of a shifted central t: at a true difference of 0 both tests reject with probability
    2 T(margin / se - t(1 - alpha)) - 1, which is `POWER` at margin = se (t(1 - alpha) + t((1 + POWER) / 2)).
    """
    found = welch(a, b, confidence=1 - 2 * alpha)
    error, degrees = found.standard_error, found.degrees
    if math.isnan(error):
        p_value, power, detectable = 1.0, 0.0, math.inf
    elif error == 0:
        p_value, power, detectable = float(abs(found.difference) >= margin), 1.0, 0.0
    else:
        p_value = float(stats.t.sf((margin - abs(found.difference)) / error, degrees))
        needed = float(stats.t.ppf(1 - alpha, degrees))
        power = max(0.0, 2 * float(stats.t.cdf(margin / error - needed, degrees)) - 1)
        detectable = error * (needed + float(stats.t.ppf((1 + POWER) / 2, degrees)))
    return Equivalence(
        difference=found.difference,
        low=found.low,
        high=found.high,
        p_value=p_value,
        margin=margin,
        power=power,
        detectable_margin=detectable,
    )


def unpaired_difference(
    a: np.ndarray, b: np.ndarray, *, confidence: float, resamples: int, seed: int
) -> tuple[float, float, float]:
    """Mean of b minus mean of a with its BCa bootstrap interval, each sample drawn again on its own.

    NaN where a sample has fewer than two values.
    """
    if min(len(a), len(b)) < 2:
        return math.nan, math.nan, math.nan
    difference = float(b.mean() - a.mean())
    if np.ptp(a) == 0 and np.ptp(b) == 0:
        return difference, difference, difference
    interval = stats.bootstrap(
        (a, b),
        lambda x, y, axis: y.mean(axis=axis) - x.mean(axis=axis),
        n_resamples=resamples,
        confidence_level=confidence,
        method="BCa",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return difference, float(interval.low), float(interval.high)


def compare_counts(count_a: int, exposure_a: int, count_b: int, exposure_b: int) -> CountComparison:
    """Exact Poisson intervals of two rates, and the exact test that they are equal.

    Given the sum of two Poisson counts, one of them is binomial (Przyborowski and Wilenski 1940); the interval of the
    ratio is Clopper and Pearson's of that binomial.
    """
    low_a, high_a = poisson_interval(count_a, exposure_a)
    low_b, high_b = poisson_interval(count_b, exposure_b)
    total = count_a + count_b
    ratio, ratio_low, ratio_high, p_value = math.nan, 0.0, math.inf, 1.0
    if total and exposure_a and exposure_b:
        found = stats.binomtest(count_b, total, exposure_b / (exposure_a + exposure_b))
        interval = found.proportion_ci(0.95, method="exact")
        ratio, ratio_low, ratio_high = (
            _odds(share) * exposure_a / exposure_b for share in (count_b / total, interval.low, interval.high)
        )
        ratio = ratio if count_a else math.nan
        p_value = float(found.pvalue)
    return CountComparison(
        count_a=count_a,
        exposure_a=exposure_a,
        low_a=low_a,
        high_a=high_a,
        count_b=count_b,
        exposure_b=exposure_b,
        low_b=low_b,
        high_b=high_b,
        rate_ratio=ratio,
        ratio_low=ratio_low,
        ratio_high=ratio_high,
        p_value=p_value,
    )


def _odds(share: float) -> float:
    return math.inf if share == 1 else share / (1 - share)


def block_length(num_steps: int) -> int:
    """Steps of a block: twice the cube root of their number, the rate at which blocks must grow (Künsch 1989).

    Simulated coverage of a 95 % interval for the ratio of two medians with this length: 0.95 without autocorrelation;
    with an AR(1) coefficient of 0.8, 0.90 for 145 steps and 0.77 for 30.
    """
    return max(1, math.ceil(2 * num_steps ** (1 / 3)))


def ratio_over_steps(
    runs_a: Sequence[np.ndarray],
    runs_b: Sequence[np.ndarray],
    statistic: Callable[[np.ndarray], np.ndarray],
    *,
    resamples: int,
    seed: int,
    confidence: float = 0.95,
) -> Ratio:
    """Ratio of a statistic of b's steps to that of a's, with a percentile interval that respects autocorrelation.

    Steps are drawn again in blocks that wrap around (circular block bootstrap, Politis and Romano 1992), within runs.
    Where a run has fewer than `MIN_STEPS` the bounds are NaN.

    Args:
        runs_a: Per run [steps, k] values of its steps.
        statistic: [resamples, steps, k] → [resamples].
    """
    rng = np.random.default_rng(seed)
    value_a, value_b = (float(statistic(np.concatenate(runs)[None])[0]) for runs in (runs_a, runs_b))
    if not value_a:
        return Ratio(value=math.nan, low=math.nan, high=math.nan)
    if min(len(steps) for steps in (*runs_a, *runs_b)) < MIN_STEPS:
        return Ratio(value=value_b / value_a, low=math.nan, high=math.nan)
    drawn_a, drawn_b = (statistic(_drawn_again(runs, resamples, rng)) for runs in (runs_a, runs_b))
    with np.errstate(divide="ignore", invalid="ignore"):  # a resample in which a rare span never ran
        ratios = drawn_b / drawn_a
    low, high = np.nanquantile(ratios, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Ratio(value=value_b / value_a, low=float(low), high=float(high))


def _drawn_again(runs: Sequence[np.ndarray], resamples: int, rng: np.random.Generator) -> np.ndarray:
    """[resamples, steps of all runs, k]."""
    parts = []
    for steps in runs:
        length = block_length(len(steps))
        starts = rng.integers(len(steps), size=(resamples, math.ceil(len(steps) / length), 1))
        indices = (starts + np.arange(length)).reshape(resamples, -1)[:, : len(steps)] % len(steps)
        parts.append(steps[indices])
    return np.concatenate(parts, axis=1)


def smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of each step and the `window` - 1 before it; steps without a value are left out, and NaN where all are."""
    seen = np.isfinite(values)
    totals = np.concatenate([[0.0], np.cumsum(np.where(seen, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(seen)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    with np.errstate(invalid="ignore"):
        return (totals[ends] - totals[starts]) / (counts[ends] - counts[starts])


def band(curves: np.ndarray, *, confidence: float = 0.95) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean over runs [runs, steps] with its t interval at each step; NaN bounds for a single run."""
    mean = curves.mean(axis=0)
    if len(curves) < 2:
        return mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan)
    reach = stats.t.ppf((1 + confidence) / 2, len(curves) - 1) * curves.std(axis=0, ddof=1) / math.sqrt(len(curves))
    return mean, mean - reach, mean + reach


def mean_by_key(tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean over the tables of each key that all of them hold; NaN entries make the mean NaN."""
    keys = [key for key in tables[0] if all(key in table for table in tables[1:])]
    return {key: float(np.mean([table[key] for table in tables])) for key in keys}
