"""From a judged group to the documents that are trained: token ids in, token ids out, never text."""

from __future__ import annotations

import numpy as np

from grpo_lib.algo.advantages import GroupAssessment
from grpo_lib.types import FinishReason, GroupStatus, Rollout, RolloutGroup, TrainingSample


def training_samples(group: RolloutGroup, assessment: GroupAssessment, *, mask_truncated: bool) -> list[TrainingSample]:
    """Documents of a KEPT group, in member order; an empty list for any other status.

    Members that are not usable are left out, and truncated ones too under `mask_truncated`. Every sampled token is
    trained, the stop token included: a policy that is never paid for stopping forgets to (trl 7039).
    """
    if len(assessment.usable) != len(group.rollouts):
        raise ValueError(
            f"group {group.group_id} has {len(group.rollouts)} members, its assessment {len(assessment.usable)}"
        )
    if assessment.status is not GroupStatus.KEPT:
        return []
    return [
        _training_sample(group, rollout, float(advantage))
        for rollout, advantage, usable in zip(group.rollouts, assessment.advantages, assessment.usable, strict=True)
        if usable and not (mask_truncated and rollout.completion.finish_reason is FinishReason.LENGTH)
    ]


def _training_sample(group: RolloutGroup, rollout: Rollout, advantage: float) -> TrainingSample:
    completion = rollout.completion
    sample_id = group.sample_id(rollout.sample_index)
    num_prompt, num_response = len(group.prompt.token_ids), len(completion.token_ids)
    if num_response == 0:
        raise ValueError(f"sample {sample_id} finished with {completion.finish_reason} but has no tokens")
    response_mask = np.arange(num_prompt + num_response) >= num_prompt
    rollout_logprobs = np.zeros(num_prompt + num_response, dtype=np.float32)
    rollout_logprobs[num_prompt:] = completion.logprobs
    return TrainingSample(
        sample_id=sample_id,
        input_ids=np.concatenate([np.asarray(group.prompt.token_ids, dtype=np.int64), completion.token_ids]),
        response_mask=response_mask,
        advantages=np.where(response_mask, np.float32(advantage), np.float32(0)),
        rollout_logprobs=rollout_logprobs,
    )
