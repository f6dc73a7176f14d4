"""Small groups, samples and batches with known numbers, for the tests of `grpo_lib.algo`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from grpo_lib.types import (
    Completion,
    FinishReason,
    PackedBatch,
    Prompt,
    Rollout,
    RolloutGroup,
    TrainingSample,
    Verdict,
    VerdictReason,
    VerdictState,
    VersionSpan,
)

STOP_TOKEN = 1


def make_rollout(
    index: int,
    reward: float,
    *,
    tokens: Sequence[int] = (7, STOP_TOKEN),
    finish: FinishReason = FinishReason.STOP,
    state: VerdictState = VerdictState.VALID,
    seed: int | None = None,
    spans: tuple[VersionSpan, ...] | None = None,
) -> Rollout:
    token_ids = np.array(tokens, dtype=np.int64)
    whole = (VersionSpan(version=0, start=0, stop=len(tokens)),) if len(tokens) else ()
    return Rollout(
        sample_index=index,
        completion=Completion(
            request_id=f"r{index}",
            token_ids=token_ids,
            logprobs=np.linspace(-0.5, -0.1, len(tokens)).astype(np.float32),
            version_spans=whole if spans is None else spans,
            finish_reason=finish,
            seed=index if seed is None else seed,
            latency_s=0.1,
        ),
        text="7",
        verdict=Verdict(
            state=state, reward=reward, reason=VerdictReason.CORRECT if reward >= 1 else VerdictReason.WRONG
        ),
    )


def make_group(
    rollouts: Sequence[Rollout], *, group_id: str = "e0.p0", prompt: tuple[int, ...] = (5, 6)
) -> RolloutGroup:
    return RolloutGroup(
        group_id=group_id,
        prompt=Prompt(
            prompt_id=group_id.split(".", 1)[1],
            text="?",
            token_ids=prompt,
            answer="7",
            dataset="test",
            verifier="integer",
        ),
        rollouts=tuple(rollouts),
    )


def make_sample(
    sample_id: str,
    num_prompt: int,
    num_response: int,
    *,
    advantage: float = 1.0,
    rollout_logprobs: Sequence[float] | None = None,
    vocab: int = 11,
    seed: int = 0,
) -> TrainingSample:
    rng = np.random.default_rng([seed, *sample_id.encode()])
    length = num_prompt + num_response
    mask = np.arange(length) >= num_prompt
    logprobs = np.zeros(length, np.float32)
    logprobs[mask] = rng.uniform(-2.0, -0.1, num_response) if rollout_logprobs is None else rollout_logprobs
    return TrainingSample(
        sample_id=sample_id,
        input_ids=rng.integers(1, vocab, length),
        response_mask=mask,
        advantages=np.where(mask, np.float32(advantage), np.float32(0)),
        rollout_logprobs=logprobs,
    )


def place(batch: PackedBatch, values: Mapping[str, Sequence[float]], *, elsewhere: float) -> torch.Tensor:
    """[B, T] float64 with each sample's values at its trained positions, found without the packing code."""
    placed = torch.full(tuple(batch.input_ids.shape), elsewhere, dtype=torch.float64)
    for row in range(batch.num_rows):
        taken = {sample_id: iter(values[sample_id]) for sample_id in batch.sample_ids[row]}
        for column in range(batch.input_ids.shape[1]):
            if batch.response_mask[row, column]:
                sample_id = batch.sample_ids[row][int(batch.doc_ids[row, column]) - 1]
                placed[row, column] = float(next(taken[sample_id]))
    return placed
