"""Scorers of stored rollouts for the parity probe: an engine, a trainer, a plain forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from grpo_lib.algo.packing import plan_step, unpack_tokens
from grpo_lib.config import TrainerConfig
from grpo_lib.errors import DataError
from grpo_lib.interfaces import TrainerGroup
from grpo_lib.types import FinishReason, RolloutGroup, StepPlan, TrainingSample

Sequences = Sequence[tuple[Sequence[int], int]]  # (token ids, number of prompt tokens)


class SequenceScorer(Protocol):
    """An engine or a plain forward."""

    def score(self, sequences: Sequences) -> list[np.ndarray]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredBySequence:
    """Scores each document through an engine or a plain forward."""

    name: str
    scorer: SequenceScorer

    def score(self, groups: Sequence[RolloutGroup]) -> Mapping[str, np.ndarray]:
        documents = stored_documents(groups)
        sequences = [((*prompt, *response.tolist()), len(prompt)) for prompt, response in documents.values()]
        return dict(zip(documents, self.scorer.score(sequences), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredByTrainer:
    """Scores documents as the trainer sees them: packed, over all ranks."""

    name: str
    trainer: TrainerGroup
    config: TrainerConfig

    def score(self, groups: Sequence[RolloutGroup]) -> Mapping[str, np.ndarray]:
        return score_packed(self.trainer, stored_documents(groups), self.config)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredBefore:
    """What a scorer gave in another process."""

    name: str
    scores: Mapping[str, np.ndarray]  # sample id → [R]

    def score(self, groups: Sequence[RolloutGroup]) -> Mapping[str, np.ndarray]:
        """In the order of the stored documents.

        Raises:
            DataError: it scored other samples.
        """
        ids = stored_documents(groups)
        if only := sorted(ids.keys() ^ self.scores.keys()):
            raise DataError(
                f"{self.name} scored {len(self.scores)} samples, {len(ids)} are stored; {len(only)} are on one side "
                f"only, first {only[0]}: these scores are of other rollouts, measure again"
            )
        return {sample_id: self.scores[sample_id] for sample_id in ids}


def stored_documents(groups: Sequence[RolloutGroup]) -> dict[str, tuple[tuple[int, ...], np.ndarray]]:
    """Sample id → (prompt ids, response ids) of every complete rollout."""
    return {
        group.sample_id(rollout.sample_index): (group.prompt.token_ids, rollout.completion.token_ids)
        for group in groups
        for rollout in group.rollouts
        if rollout.completion.finish_reason is not FinishReason.ABORT
    }


def score_packed(
    trainer: TrainerGroup, documents: Mapping[str, tuple[Sequence[int], np.ndarray]], config: TrainerConfig
) -> dict[str, np.ndarray]:
    """Sample id → [R] float32 log-probabilities of the response tokens by the trainer's policy."""
    plan = scoring_plan(documents, config, num_ranks=trainer.num_ranks)
    scores: dict[str, np.ndarray] = {}
    for batches, logprobs in zip(plan.micro_batches, trainer.logprobs(plan), strict=True):
        for batch, values in zip(batches, logprobs, strict=True):
            scores.update(unpack_tokens(batch, values))
    return {sample_id: scores[sample_id] for sample_id in documents}


def scoring_plan(
    documents: Mapping[str, tuple[Sequence[int], np.ndarray]], config: TrainerConfig, *, num_ranks: int
) -> StepPlan:
    """The documents as the ranks of a trainer see them, packed."""
    return plan_step(
        [_document(sample_id, prompt, response) for sample_id, (prompt, response) in documents.items()],
        num_ranks=num_ranks,
        pack_length=config.pack_length,
        micro_batch_packs=config.micro_batch_packs,
    )


def _document(sample_id: str, prompt: Sequence[int], response: np.ndarray) -> TrainingSample:
    """A document to score: its response is marked, its advantages and sampler log-probabilities are zero."""
    input_ids = np.concatenate([np.asarray(prompt, np.int64), response])
    zeros = np.zeros(len(input_ids), np.float32)
    return TrainingSample(
        sample_id=sample_id,
        input_ids=input_ids,
        response_mask=np.arange(len(input_ids)) >= len(prompt),
        advantages=zeros,
        rollout_logprobs=zeros,
    )
