import math

import numpy as np
import pytest

from grpo_lib.algo.mismatch import token_mismatch
from grpo_lib.types import StepMetrics


def test_hand_worked_statistics():
    """Ratios new / rollout of 1, 1/2, 3 and 1.05 with cap 2."""
    rollout = np.full(4, -2.0)
    new = rollout + np.log([1.0, 0.5, 3.0, 1.05])
    values = token_mismatch(new, rollout, cap=2.0).values()
    logs = [0.0, -math.log(2), math.log(3), math.log(1.05)]
    assert values["mismatch/abs_mean"] == pytest.approx(sum(map(abs, logs)) / 4)
    assert values["mismatch/abs_max"] == pytest.approx(math.log(3))
    assert values["mismatch/k1"] == pytest.approx(-sum(logs) / 4)
    assert values["mismatch/k3"] == pytest.approx(
        (0 + (0.5 - 1 + math.log(2)) + (2 - math.log(3)) + (0.05 - math.log(1.05))) / 4
    )
    assert values["mismatch/outside_band"] == 0.5  # 1/2 and 3: both sides
    assert values["mismatch/tis_clipfrac"] == 0.25  # 3 only: one side
    assert values["mismatch/tis_clip_count"] == 1
    assert values["mismatch/tis_ratio"] == pytest.approx((1 + 0.5 + 2 + 1.05) / 4)
    assert values["mismatch/nan_count"] == 0


def test_quantile_is_of_all_tokens_after_merging():
    rng = np.random.default_rng(0)
    d = rng.normal(0, 1e-3, 1000)
    parts = [token_mismatch(part, np.zeros_like(part), cap=2.0) for part in np.split(d, [3, 500])]
    merged = StepMetrics.merged(parts).values()
    whole = token_mismatch(d, np.zeros_like(d), cap=2.0).values()
    assert merged == pytest.approx(whole, rel=1e-12)
    assert merged["mismatch/abs_p99"] == pytest.approx(np.quantile(np.abs(d), 0.99), rel=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf")])
def test_values_that_are_not_finite_are_counted_and_lie_outside_the_band(bad: float):
    """trl 6166: a NaN behind a sentinel makes the clip fraction look perfect."""
    new = np.array([-1.0, bad, -1.0])
    values = token_mismatch(new, np.full(3, -1.0), cap=2.0).values()
    assert values["mismatch/nan_count"] == 1
    assert values["mismatch/outside_band"] == pytest.approx(1 / 3)
    assert values["mismatch/abs_mean"] == values["mismatch/abs_max"] == 0
    assert math.isfinite(values["mismatch/tis_ratio"])


def test_rho_is_of_the_proximal_policy_where_there_is_one():
    new = rollout = np.array([-1.0, -1.0])
    on_policy = token_mismatch(new, rollout, cap=2.0).values()
    assert on_policy["mismatch/tis_clip_count"] == 0
    stale = token_mismatch(new, rollout, cap=2.0, old_n=np.array([-1.0, -1.0 + math.log(4)])).values()
    assert stale["mismatch/tis_clip_count"] == 1
    assert stale["mismatch/abs_max"] == 0
    assert stale["mismatch/tis_ratio"] == 1.5


def test_no_tokens_merge_as_nothing():
    empty = token_mismatch(np.zeros(0), np.zeros(0), cap=2.0)
    full = token_mismatch(np.array([-1.0]), np.array([-1.5]), cap=2.0)
    assert StepMetrics.merged([empty, full, empty]).values() == full.values()
