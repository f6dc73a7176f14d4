"""What replay trains on: a stored step, its identity as each side sees it, and whether its record is consistent."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_lib.algo.advantages import GroupAssessment, assess_group
from grpo_lib.config import RunConfig
from grpo_lib.errors import DataError
from grpo_lib.loop import trainable_samples
from grpo_lib.pipeline import StepRollouts, group_id
from grpo_lib.seeds import sample_seed
from grpo_lib.types import PackedBatch, RolloutGroup, StepPlan

# What a document consists of; reference and proximal log-probabilities are the trainer's own work, not its input.
_FIELDS = ("input_ids", "labels", "position_ids", "response_mask", "advantages", "rollout_logprobs")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplayBatch:
    """One stored step of a run, in the order it was drawn."""

    step: int  # 1-based
    groups: tuple[RolloutGroup, ...]
    assessments: tuple[GroupAssessment, ...]
    content_digest: str  # sha256 of the stored table without its timings

    @property
    def rollouts(self) -> StepRollouts:
        """As the loop takes them."""
        return StepRollouts(groups=self.groups, assessments=self.assessments, num_draws=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputAudit:
    """Whether a stored step is what its run says it drew and judged; each tuple names what is not."""

    step: int
    num_groups: int
    num_samples: int
    wrong_advantages: tuple[str, ...]  # groups whose stored advantages are not those of their stored rewards
    wrong_versions: tuple[str, ...]  # samples of a policy that this step cannot have drawn from
    wrong_seeds: tuple[str, ...]  # samples that the run's seed would not have drawn


def plan_digest(plan: StepPlan) -> str:
    """sha256 of a plan's documents: equal for two trainers that get the same samples, however each packs them."""
    documents = {
        sample_id: _document_digest(batch, row, doc_id)
        for rank in plan.micro_batches
        for batch in rank
        for row, sample_ids in enumerate(batch.sample_ids)
        for doc_id, sample_id in enumerate(sample_ids, start=1)
    }
    digest = hashlib.sha256()
    for sample_id in sorted(documents):
        digest.update(f"{sample_id}\n".encode() + documents[sample_id])
    return digest.hexdigest()


def _document_digest(batch: PackedBatch, row: int, doc_id: int) -> bytes:
    places = batch.doc_ids[row] == doc_id
    digest = hashlib.sha256()
    for name in _FIELDS:
        values = getattr(batch, name)[row][places].cpu().numpy()
        digest.update(f"{name} {len(values)} {values.dtype}\n".encode() + values.tobytes())
    return digest.digest()


def audit_inputs(steps: Sequence[ReplayBatch], config: RunConfig) -> tuple[InputAudit, ...]:
    """Judge the record of the run's first steps.

    Args:
        steps: Consecutive from step 1, so that the version each was drawn from is known.

    Raises:
        DataError: they are not.
    """
    found = [batch.step for batch in steps]
    if found != list(range(1, len(steps) + 1)):
        raise DataError(f"steps {found} are not consecutive from 1; replay starts at the base model")
    audits, version = [], 0
    for batch in steps:
        audits.append(_audit(batch, config, version))
        version += bool(trainable_samples(config, batch.rollouts))
    return tuple(audits)


def _audit(batch: ReplayBatch, config: RunConfig, version: int) -> InputAudit:
    samples = [(group, rollout) for group in batch.groups for rollout in group.rollouts]
    oldest = version - config.loop.max_staleness
    return InputAudit(
        step=batch.step,
        num_groups=len(batch.groups),
        num_samples=len(samples),
        wrong_advantages=tuple(
            group.group_id
            for group, stored in zip(batch.groups, batch.assessments, strict=True)
            if not _same(stored, _assess(group, config))
        ),
        wrong_versions=tuple(
            f"{group.sample_id(rollout.sample_index)} (version {span.version} at {version})"
            for group, rollout in samples
            for span in rollout.completion.version_spans
            if not oldest <= span.version <= version
        ),
        wrong_seeds=tuple(
            group.sample_id(rollout.sample_index)
            for group, rollout in samples
            if rollout.completion.seed != _seed(group, rollout.sample_index, config)
        ),
    )


def _assess(group: RolloutGroup, config: RunConfig) -> GroupAssessment:
    return assess_group(group, kind=config.algorithm.advantage, correct_reward=config.verifier.correct_reward)


def _same(stored: GroupAssessment, again: GroupAssessment) -> bool:
    return (
        stored.status is again.status
        and np.array_equal(stored.usable, again.usable)
        and np.array_equal(stored.advantages, again.advantages)
    )


def _seed(group: RolloutGroup, sample_index: int, config: RunConfig) -> int | None:
    """The seed of a group's member by its group id, ``"e<epoch>.<prompt id>"``; None for an id of another form."""
    epoch = group.group_id.removesuffix(f".{group.prompt.prompt_id}").removeprefix("e")
    if not epoch.isdecimal() or group_id(int(epoch), group.prompt) != group.group_id:
        return None
    return sample_seed(config.seed, int(epoch), group.prompt.prompt_id, sample_index)
