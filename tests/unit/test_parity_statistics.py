"""Tests and intervals against numbers worked by hand, published examples, scipy's own, and simulation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from grpo_lib.parity.statistics import (
    band,
    block_length,
    compare_counts,
    equal_means_p,
    equivalence,
    mean_by_key,
    ratio_over_steps,
    smoothed,
    unpaired_difference,
    welch,
)

A, B = (0.90, 0.92, 0.94), (0.91, 0.93, 0.95, 0.97)


def test_welch_by_hand() -> None:
    """Variances 0.0004 and 0.0020/3 over 3 and 4 values: se² = 0.0004/3 + 0.0005/3 = 0.0003."""
    found = welch(A, B)
    assert found.difference == pytest.approx(0.02)
    assert found.standard_error**2 == pytest.approx(0.0003)
    assert found.degrees == pytest.approx(0.0003**2 / ((0.0004 / 3) ** 2 / 2 + (0.0005 / 3) ** 2 / 3))
    reference: Any = stats.ttest_ind(B, A, equal_var=False)
    interval = reference.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert equal_means_p(A, B) == pytest.approx(reference.pvalue)


def test_equivalence_is_the_interval_inside_the_margin() -> None:
    """p is below 5 % exactly when the 90 % interval is inside; at its farther bound p is 5 %."""
    found = equivalence(A, B, margin=0.07)
    reference = stats.ttest_ind(B, A, equal_var=False).confidence_interval(0.90)
    assert (found.low, found.high) == pytest.approx((reference.low, reference.high))
    assert equivalence(A, B, margin=found.high).p_value == pytest.approx(0.05)
    assert equivalence(A, B, margin=found.high * 1.01).p_value < 0.05
    assert equivalence(A, B, margin=found.high / 1.01).p_value > 0.05
    above: Any = stats.ttest_ind(np.add(B, 0.07), A, equal_var=False, alternative="greater")
    below: Any = stats.ttest_ind(np.subtract(B, 0.07), A, equal_var=False, alternative="less")
    assert found.p_value == pytest.approx(max(above.pvalue, below.pvalue)), "the two one-sided tests themselves"


def test_equivalence_keeps_its_level_and_has_the_power_it_states() -> None:
    """At a true difference of the margin, 5 % of pairs may pass; at 0, about `power` do."""
    rng = np.random.default_rng(0)
    spread, seeds, repetitions = 0.02, 6, 2000
    results = {}
    for shift in (0.0, 0.05):
        found = [
            equivalence(rng.normal(0, spread, seeds).tolist(), rng.normal(shift, spread, seeds).tolist(), margin=0.05)
            for _ in range(repetitions)
        ]
        results[shift] = np.mean([one.low > -0.05 and one.high < 0.05 for one in found])
        wrong = np.mean([one.low > 0.05 or one.high < -0.05 for one in found])
        assert wrong <= (0.06 if shift else 0.0), "shown to be farther apart than they are"
        if not shift:
            assert results[0.0] == pytest.approx(np.mean([one.power for one in found]), abs=0.05)
    assert results[0.05] <= 0.06


def test_the_detectable_margin_is_the_one_with_power_of_four_fifths() -> None:
    found = equivalence(A, B, margin=0.05)
    assert equivalence(A, B, margin=found.detectable_margin).power == pytest.approx(0.8)


@pytest.mark.parametrize(("a", "b"), [([0.9], [0.9]), ([0.9, 0.91], [0.9]), ([], [0.9, 0.9]), ([], [])])
def test_one_value_has_no_spread(a: list[float], b: list[float]) -> None:
    found = equivalence(a, b, margin=0.05)
    assert (found.low, found.high, found.p_value, found.power) == (-math.inf, math.inf, 1.0, 0.0)
    assert found.detectable_margin == math.inf
    assert math.isnan(equal_means_p(a, b))


def test_values_without_spread() -> None:
    same, apart = equivalence([1.0, 1.0], [1.0, 1.0], margin=0.05), equivalence([1.0, 1.0], [0.9, 0.9], margin=0.05)
    assert (same.low, same.high, same.p_value) == (0, 0, 0)
    assert apart.high == pytest.approx(-0.1)
    assert apart.p_value == 1
    assert (equal_means_p([1, 1], [1, 1]), equal_means_p([1, 1], [2, 2])) == (1, 0)


# ---- counts


def test_counts_by_hand() -> None:
    """0 of 1000 against 5 of 1000: given 5 events, all on one side has probability 2 · 2⁻⁵."""
    found = compare_counts(0, 1000, 5, 1000)
    assert found.p_value == pytest.approx(2 / 32)
    assert math.isnan(found.rate_ratio)
    assert found.ratio_high == math.inf
    assert found.low_a == 0
    assert found.high_a == pytest.approx(-math.log(0.025) / 1000), "no event at all: exp(-mean) is 2.5 %"
    # Clopper and Pearson with every event on one side: the lower limit of the share is (alpha / 2)^(1 / n).
    share = 0.025 ** (1 / 5)
    assert found.ratio_low == pytest.approx(share / (1 - share))


def test_exposure_counts() -> None:
    assert compare_counts(10, 1000, 100, 10_000).p_value == pytest.approx(1)
    assert compare_counts(10, 1000, 100, 10_000).rate_ratio == pytest.approx(1)
    assert compare_counts(10, 1000, 10, 10_000).p_value < 1e-5


@pytest.mark.parametrize("counts", [(0, 1000, 0, 1000), (0, 0, 0, 0), (0, 0, 3, 100)])
def test_nothing_seen_shows_nothing(counts: tuple[int, int, int, int]) -> None:
    found = compare_counts(*counts)
    assert (found.p_value, found.ratio_low, found.ratio_high) == (1.0, 0.0, math.inf)


def test_the_count_test_and_its_interval_keep_their_level() -> None:
    rng = np.random.default_rng(1)
    found = [compare_counts(int(rng.poisson(8)), 1000, int(rng.poisson(16)), 2000) for _ in range(1000)]
    assert np.mean([one.p_value < 0.05 for one in found]) <= 0.05
    assert np.mean([one.ratio_low <= 1 <= one.ratio_high for one in found]) >= 0.95


# ---- prompts


def test_unpaired_bootstrap_covers_the_true_difference() -> None:
    rng = np.random.default_rng(2)
    hits = 0
    for repetition in range(100):
        a, b = rng.beta(8, 2, 40), rng.beta(8, 2, 60) - 0.1
        _, low, high = unpaired_difference(a, b, confidence=0.9, resamples=300, seed=repetition)
        hits += low <= -0.1 <= high
    assert 0.8 <= hits / 100 <= 0.97


def test_unpaired_bootstrap_of_too_little_or_without_spread() -> None:
    assert all(map(math.isnan, unpaired_difference(np.ones(1), np.ones(5), confidence=0.9, resamples=100, seed=0)))
    flat = unpaired_difference(np.ones(5), np.zeros(5), confidence=0.9, resamples=100, seed=0)
    assert flat == (-1.0, -1.0, -1.0)


def test_means_by_prompt() -> None:
    assert mean_by_key([{"p": 0.5, "q": 1.0}, {"p": 0.7, "r": 0.0}]) == {"p": pytest.approx(0.6)}
    assert math.isnan(mean_by_key([{"p": math.nan}, {"p": 1.0}])["p"])


# ---- steps


def median(steps: np.ndarray) -> np.ndarray:
    return np.median(steps[..., 0], axis=1)


def autocorrelated(rng: np.random.Generator, steps: int, coefficient: float) -> np.ndarray:
    values = rng.normal(0, 0.1, steps + 50)
    for i in range(1, len(values)):
        values[i] += coefficient * values[i - 1]
    return np.exp(values[50:])[:, None]


@pytest.mark.parametrize(("coefficient", "least"), [(0.0, 0.90), (0.5, 0.86), (0.8, 0.82)])
def test_ratio_of_times_covers_one_for_equal_trainers(coefficient: float, least: float) -> None:
    """100 pairs of runs of 145 steps, intervals of 95 %."""
    rng = np.random.default_rng(3)
    hits = 0
    for repetition in range(100):
        a, b = autocorrelated(rng, 145, coefficient), autocorrelated(rng, 145, coefficient)
        ratio = ratio_over_steps([a], [b], median, resamples=200, seed=repetition)
        hits += ratio.low <= 1 <= ratio.high
    assert hits / 100 >= least


def test_steps_drawn_one_by_one_would_promise_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(4)
    a, b = autocorrelated(rng, 145, 0.8), autocorrelated(rng, 145, 0.8)
    blocks = ratio_over_steps([a], [b], median, resamples=500, seed=0)
    monkeypatch.setattr("grpo_lib.parity.statistics.block_length", lambda _: 1)
    single = ratio_over_steps([a], [b], median, resamples=500, seed=0)
    assert blocks.high - blocks.low > 1.5 * (single.high - single.low)
    assert blocks.value == single.value


def test_ratio_is_of_all_steps_and_repeats() -> None:
    a, b = [np.full((20, 1), 2.0), np.full((40, 1), 4.0)], [np.full((25, 1), 12.0)]
    ratio = ratio_over_steps(a, b, median, resamples=50, seed=0)
    assert (ratio.value, ratio.low, ratio.high) == (3.0, 3.0, 3.0)
    rng = np.random.default_rng(5)
    noisy = [autocorrelated(rng, 30, 0.5)]
    first, second = (ratio_over_steps(noisy, a, median, resamples=50, seed=9) for _ in range(2))
    assert first == second
    nothing = ratio_over_steps([np.zeros((30, 1))], b, median, resamples=50, seed=0)
    assert all(map(math.isnan, (nothing.value, nothing.low, nothing.high)))


def test_few_steps_have_a_ratio_and_no_interval() -> None:
    for short, whole in (
        ([np.ones((1, 1))], [np.full((40, 1), 3.0)]),
        ([np.ones((40, 1)), np.ones((19, 1))], [3 * np.ones((40, 1))]),
    ):
        ratio = ratio_over_steps(short, whole, median, resamples=50, seed=0)
        assert ratio.value == 3.0
        assert math.isnan(ratio.low)
        assert math.isnan(ratio.high)


def test_block_length_grows_with_the_cube_root() -> None:
    assert [block_length(steps) for steps in (1, 8, 27, 145, 1000)] == [2, 4, 6, 11, 20]


# ---- curves


def test_smoothing_by_hand() -> None:
    found = smoothed(np.array([1.0, 3.0, math.nan, 5.0, math.nan, math.nan]), 2)
    assert found[:5].tolist() == [1.0, 2.0, 3.0, 5.0, 5.0]
    assert math.isnan(found[5]), "both steps of the window saw nothing"


def test_band_by_hand() -> None:
    """Three runs at 1, 2, 3: mean 2, standard error 1/√3, t(0.975, 2) = 4.303."""
    mean, low, high = band(np.array([[1.0], [2.0], [3.0]]))
    assert mean.tolist() == [2.0]
    assert high[0] - 2 == pytest.approx(4.30265 / math.sqrt(3), rel=1e-5)
    assert low[0] == pytest.approx(4 - high[0])
    assert np.isnan(band(np.array([[1.0, 2.0]]))[1]).all(), "one run has no band"
