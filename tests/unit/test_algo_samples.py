import numpy as np
import pytest

from grpo_lib.algo.advantages import assess_group
from grpo_lib.algo.samples import training_samples
from grpo_lib.types import FinishReason, RolloutGroup, TrainingSample
from tests.unit.algo_cases import STOP_TOKEN, make_group, make_rollout


def samples_of(group: RolloutGroup, *, mask_truncated: bool = False) -> list[TrainingSample]:
    assessment = assess_group(group, kind="centered", correct_reward=1.0)
    return training_samples(group, assessment, mask_truncated=mask_truncated)


def test_golden_sample_keeps_ids_and_logprobs_as_sampled_and_trains_the_stop_token():
    """trl 5224: ids are never re-encoded, so a pair that a tokenizer would merge stays two tokens."""
    group = make_group([make_rollout(0, 1.0, tokens=(7, 7, STOP_TOKEN)), make_rollout(1, 0.0)])
    sample = samples_of(group)[0]
    assert sample.sample_id == "e0.p0/0"
    assert sample.input_ids.tolist() == [5, 6, 7, 7, STOP_TOKEN]
    assert sample.input_ids.dtype == np.int64
    assert sample.response_mask.tolist() == [False, False, True, True, True]
    assert sample.advantages.tolist() == [0, 0, 0.5, 0.5, 0.5]
    np.testing.assert_array_equal(sample.rollout_logprobs, np.array([0, 0, -0.5, -0.3, -0.1], np.float32))
    assert sample.advantages.dtype == sample.rollout_logprobs.dtype == np.float32


def test_truncated_is_what_the_engine_says_not_what_the_last_token_is():
    """trl 7039: with several stop ids, a completion ending in any of them is a stop; only the limit truncates."""
    group = make_group(
        [
            make_rollout(0, 1.0, tokens=(7, 2)),  # a second stop id
            make_rollout(1, 0.0, tokens=(7, STOP_TOKEN), finish=FinishReason.LENGTH),
        ]
    )
    assert [s.sample_id for s in samples_of(group, mask_truncated=True)] == ["e0.p0/0"]
    assert [s.sample_id for s in samples_of(group)] == ["e0.p0/0", "e0.p0/1"]


def test_a_finished_completion_without_tokens_is_an_error_that_names_it():
    group = make_group([make_rollout(0, 1.0, tokens=()), make_rollout(1, 0.0)])
    with pytest.raises(ValueError, match=r"e0\.p0/0 finished with stop but has no tokens"):
        samples_of(group)


def test_assessment_of_another_group_is_refused():
    assessment = assess_group(
        make_group([make_rollout(0, 1.0), make_rollout(1, 0.0)]), kind="centered", correct_reward=1
    )
    with pytest.raises(ValueError, match="3 members, its assessment 2"):
        training_samples(make_group([make_rollout(i, 1.0) for i in range(3)]), assessment, mask_truncated=False)


def test_duplicate_prompts_are_two_groups_with_distinct_sample_ids():
    """Search-R1 88: ids are by occurrence, so a prompt that occurs twice does not merge its groups."""
    rollouts = [make_rollout(0, 1.0), make_rollout(1, 0.0)]
    groups = [make_group(rollouts, group_id=f"e0.{prompt_id}") for prompt_id in ("row-3", "row-9")]
    ids = [sample.sample_id for group in groups for sample in samples_of(group)]
    assert ids == ["e0.row-3/0", "e0.row-3/1", "e0.row-9/0", "e0.row-9/1"]
