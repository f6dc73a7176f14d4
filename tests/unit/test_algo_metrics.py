import math

import pytest

from grpo_lib.algo.advantages import assess_group
from grpo_lib.algo.metrics import rollout_metrics
from grpo_lib.types import FinishReason, RolloutGroup, StepMetrics, VerdictState, VersionSpan
from tests.unit.algo_cases import make_group, make_rollout


def metrics_of(groups: list[RolloutGroup], *, policy_version: int = 0) -> StepMetrics:
    assessments = [assess_group(group, kind="centered", correct_reward=1.0) for group in groups]
    return rollout_metrics(groups, assessments, policy_version=policy_version)


def four_groups() -> list[RolloutGroup]:
    """Kept (1, 0, 0), all right (1, 1), all wrong (0, 0), excluded (1 and a failed verdict)."""
    return [
        make_group([make_rollout(0, 1.0, seed=1), make_rollout(1, 0.0, seed=2), make_rollout(2, 0.0, seed=3)]),
        make_group([make_rollout(0, 1.0, seed=4), make_rollout(1, 1.0, seed=5)], group_id="e0.p1"),
        make_group([make_rollout(0, 0.0, seed=6), make_rollout(1, 0.0, seed=7)], group_id="e0.p2"),
        make_group(
            [make_rollout(0, 1.0, seed=8), make_rollout(1, 99.0, state=VerdictState.FAILED, seed=9)], group_id="e0.p3"
        ),
    ]


def test_rewards_and_groups_by_hand():
    values = metrics_of(four_groups()).values()
    assert values["reward/mean"] == values["reward/correct_rate"] == 4 / 8  # the failed verdict's 99 is no reward
    assert values["reward/correct_rate_kept"] == pytest.approx(1 / 3)
    counts = [values[f"group/{s}"] for s in ("kept", "zero_spread_high", "zero_spread_low", "excluded")]
    assert counts == [1, 1, 1, 1]
    assert values["verdict/failed_share"] == pytest.approx(1 / 9)
    assert values["advantage/max"] == pytest.approx(2 / 3)
    assert values["advantage/min"] == pytest.approx(-1 / 3)
    assert values["advantage/mean"] == pytest.approx(0, abs=1e-15)


def test_responses_by_hand():
    rollouts = [make_rollout(i, float(i % 2), tokens=range(2, 3 + i)) for i in range(20)]  # 1 … 20 tokens
    rollouts.append(make_rollout(20, 0.0, tokens=range(100), finish=FinishReason.LENGTH))
    rollouts.append(make_rollout(21, 0.0, tokens=range(500), finish=FinishReason.ABORT))
    values = metrics_of([make_group(rollouts)]).values()
    assert values["response/len_mean"] == pytest.approx((210 + 100) / 21)  # the aborted fragment is left out
    assert values["response/len_p95"] == 20
    assert values["response/len_max"] == 100
    assert values["response/stop_rate"] == pytest.approx(20 / 22)
    assert values["response/truncated"] == values["response/aborted"] == pytest.approx(1 / 22)


def test_staleness_is_per_token():
    """One completion over two versions: 3 tokens of age 4 and 1 of age 1; another all of age 0."""
    spans = (VersionSpan(version=6, start=0, stop=3), VersionSpan(version=9, start=3, stop=4))
    fresh = (VersionSpan(version=10, start=0, stop=2),)
    group = make_group(
        [make_rollout(0, 1.0, tokens=(2, 3, 4, 1), spans=spans), make_rollout(1, 0.0, tokens=(2, 1), spans=fresh)]
    )
    values = metrics_of([group], policy_version=10).values()
    assert values["staleness/mean"] == pytest.approx((3 * 4 + 1) / 6)
    assert values["staleness/max"] == 4


def test_copies_from_one_seed_show():
    """UniRL 208: every member drawn from the same seed."""
    same = [make_rollout(i, 1.0, seed=5) for i in range(4)]
    values = metrics_of([make_group(same)]).values()
    assert values["sampling/seed_collisions"] == 3
    assert values["group/unique_completions"] == 1 / 4
    distinct = [make_rollout(i, float(i % 2), tokens=(7 + i, 1)) for i in range(4)]
    values = metrics_of([make_group(distinct)]).values()
    assert values["sampling/seed_collisions"] == 0
    assert values["group/unique_completions"] == 1


def test_parts_merge_to_the_whole():
    groups = four_groups()
    merged = StepMetrics.merged([metrics_of(groups[:1]), metrics_of(groups[1:3]), metrics_of(groups[3:])])
    assert merged.values() == pytest.approx(metrics_of(groups).values())


def test_a_step_without_kept_groups_reports_no_advantages_and_still_its_rewards():
    values = metrics_of(four_groups()[1:3]).values()
    assert "advantage/max" not in values
    assert math.isnan(values["reward/correct_rate_kept"])
    assert values["reward/correct_rate"] == 0.5
    assert values["group/kept"] == 0


def test_no_groups_at_all():
    values = metrics_of([]).values()
    assert values["group/kept"] == values["sampling/seed_collisions"] == 0
    assert math.isnan(values["reward/mean"])
