import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lib.algo.advantages import assess_group, group_advantages
from grpo_lib.algo.samples import training_samples
from grpo_lib.types import FinishReason, GroupStatus, VerdictState
from tests.unit.algo_cases import make_group, make_rollout


def test_hand_worked_advantages():
    rewards = np.array([1.0, 0.0, 0.0, 1.0, 3.0])  # mean 1, population variance 6/5
    assert group_advantages(rewards, "centered").tolist() == [0, -1, -1, 0, 2]
    np.testing.assert_allclose(
        group_advantages(rewards, "standard"), np.array([0, -1, -1, 0, 2]) / (np.sqrt(1.2) + 1e-8), rtol=1e-14
    )
    # Mean of the others: 1, 5/4, 5/4, 1, 1/2.
    np.testing.assert_allclose(group_advantages(rewards, "leave_one_out"), [0, -1.25, -1.25, 0, 2.5], rtol=1e-14)


def test_one_correct_of_sixteen_at_reward_ten_is_the_largest_centered_advantage():
    rewards = np.array([10.0] + [0.0] * 15)
    assert group_advantages(rewards, "centered").max() == 9.375


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.floats(-100, 100), min_size=2, max_size=20))
def test_leave_one_out_equals_its_definition(rewards: list[float]):
    expected = [r - (sum(rewards) - r) / (len(rewards) - 1) for r in rewards]
    np.testing.assert_allclose(group_advantages(np.array(rewards), "leave_one_out"), expected, atol=1e-10)


@pytest.mark.parametrize("rewards", [[1.0], [], [1.0, float("nan")], [[1.0, 2.0]]])
def test_rewards_that_cannot_be_compared_are_refused(rewards: list):
    with pytest.raises(ValueError, match="rewards"):
        group_advantages(np.array(rewards), "centered")


def test_failed_and_aborted_members_are_left_out_of_the_statistics():
    """NeMo-RL 2207: a broken verifier is not a wrong answer; vLLM's abort is not a natural stop."""
    group = make_group(
        [
            make_rollout(0, 1.0),
            make_rollout(1, 0.0, state=VerdictState.FAILED),
            make_rollout(2, 0.0),
            make_rollout(3, 0.0, finish=FinishReason.ABORT),
            make_rollout(4, 0.0, state=VerdictState.ZERO),
        ]
    )
    assessment = assess_group(group, kind="centered", correct_reward=1.0)
    assert assessment.status is GroupStatus.KEPT
    assert assessment.usable.tolist() == [True, False, True, False, True]
    np.testing.assert_allclose(assessment.advantages, [2 / 3, 0, -1 / 3, 0, -1 / 3], rtol=1e-15)
    trained = training_samples(group, assessment, mask_truncated=False)
    assert [sample.sample_id for sample in trained] == ["e0.p0/0", "e0.p0/2", "e0.p0/4"]


@pytest.mark.parametrize(
    ("rewards", "correct", "status"),
    [
        ([0.0, 0.0], 1.0, GroupStatus.ZERO_SPREAD_LOW),
        ([0.5, 0.5], 1.0, GroupStatus.ZERO_SPREAD_LOW),  # the middle itself counts as low
        ([0.6, 0.6], 1.0, GroupStatus.ZERO_SPREAD_HIGH),
        ([10.0, 10.0], 10.0, GroupStatus.ZERO_SPREAD_HIGH),
        ([4.0, 4.0], 10.0, GroupStatus.ZERO_SPREAD_LOW),
        ([0.1, 0.1, 0.1], 1.0, GroupStatus.ZERO_SPREAD_LOW),  # 0.1 minus the mean is not 0 in floating point
        ([0.0, 1.0], 1.0, GroupStatus.KEPT),
    ],
)
def test_status_by_spread_and_level(rewards: list[float], correct: float, status: GroupStatus):
    group = make_group([make_rollout(i, r) for i, r in enumerate(rewards)])
    assessment = assess_group(group, kind="standard", correct_reward=correct)
    assert assessment.status is status
    if status is not GroupStatus.KEPT:
        assert not assessment.advantages.any()
        assert training_samples(group, assessment, mask_truncated=False) == []


def test_a_group_with_one_usable_member_is_excluded():
    group = make_group([make_rollout(0, 1.0), make_rollout(1, 0.0, state=VerdictState.FAILED)])
    assert assess_group(group, kind="centered", correct_reward=1.0).status is GroupStatus.EXCLUDED


def test_truncated_members_count_in_the_statistics_though_not_in_the_loss():
    """open-instruct 1794: masking the truncated member first would leave the other two without any spread."""
    group = make_group(
        [
            make_rollout(0, 1.0),
            make_rollout(1, 0.0, finish=FinishReason.LENGTH, tokens=(7, 8, 9)),
            make_rollout(2, 1.0),
        ]
    )
    assessment = assess_group(group, kind="centered", correct_reward=1.0)
    samples = training_samples(group, assessment, mask_truncated=True)
    assert [sample.sample_id for sample in samples] == ["e0.p0/0", "e0.p0/2"]
    for sample in samples:
        np.testing.assert_allclose(sample.advantages[sample.response_mask], 1 / 3, rtol=1e-6)
    masked_first = make_group([make_rollout(0, 1.0), make_rollout(1, 1.0)])
    assert assess_group(masked_first, kind="centered", correct_reward=1.0).status is GroupStatus.ZERO_SPREAD_HIGH


def test_a_group_is_judged_by_itself():
    """Nothing in another group reaches this one: the same rollouts give the same samples whatever else is judged."""
    first = make_group([make_rollout(0, 1.0), make_rollout(1, 0.0)], group_id="e0.a")

    def samples_of_first(other_rewards: list[float]) -> list[np.ndarray]:
        other = make_group([make_rollout(i, r) for i, r in enumerate(other_rewards)], group_id="e0.b")
        assessed = [(g, assess_group(g, kind="standard", correct_reward=1.0)) for g in (first, other)]
        samples = [s for g, a in assessed for s in training_samples(g, a, mask_truncated=False)]
        return [s.advantages for s in samples if s.sample_id.startswith("e0.a/")]

    np.testing.assert_array_equal(samples_of_first([0.0, 1.0, 1.0]), samples_of_first([100.0, -100.0, 7.0]))
    pooled = [group_advantages(np.array([1.0, 0.0, *other]), "standard")[:2] for other in ([0, 1, 1], [100, -100, 7])]
    assert np.abs(pooled[0] - pooled[1]).max() > 0.1, "statistics over the whole batch would be noticed"
