"""The objective of one micro-batch: what every trainer backend calls between its forward and its backward pass."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from grpo_lib.algo.host_copy import HostCopy
from grpo_lib.algo.mismatch import token_mismatch
from grpo_lib.errors import NonFiniteLogprobs
from grpo_lib.interfaces import PolicyLoss
from grpo_lib.types import PackedBatch, Stat, StepMetrics

_NAMED_TOKENS = 3  # offending tokens a message names


def micro_batch_objective(
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    batch: PackedBatch,
    loss: PolicyLoss,
    *,
    loss_denominator: float,
    correction_cap: float,
) -> tuple[torch.Tensor, StepMetrics]:
    """Loss to call `backward` on, and the metrics of the loss, the engine mismatch and the entropy.

    A micro-batch without trained tokens gives a loss of exactly 0 that still has a graph to `logprobs`: a rank that
    skipped its backward pass would leave the others waiting in a collective.

    Args:
        logprobs: [B, T] of `batch.labels`, with gradient.
        entropy: [B, T] nats, without.
        loss_denominator: Trained tokens of the whole step over all ranks, or the configured constant.
        correction_cap: Cap that the `mismatch/tis_*` metrics count against.

    Raises:
        NonFiniteLogprobs: a trained token has a NaN or infinite log-probability, from whichever policy.
    """
    value, finish = deferred_objective(
        logprobs, entropy, batch, loss, loss_denominator=loss_denominator, correction_cap=correction_cap
    )
    return value, finish()


def deferred_objective(
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    batch: PackedBatch,
    loss: PolicyLoss,
    *,
    loss_denominator: float,
    correction_cap: float,
) -> tuple[torch.Tensor, Callable[[], StepMetrics]]:
    """`micro_batch_objective` of a batch on CPU, whose metrics and check wait until they are asked for.

    Log-probabilities and entropies may be on a GPU. The host waits for them in the second result only, so that the
    backward pass can be queued before, and does not wait for that one.
    """
    assert logprobs.shape == batch.response_mask.shape, (logprobs.shape, batch.response_mask.shape)
    assert logprobs.dtype in (torch.float32, torch.float64), logprobs.dtype
    value, loss_metrics = loss(logprobs, batch.to(logprobs.device), loss_denominator)
    scored = HostCopy(torch.stack([logprobs.detach(), entropy.detach().to(logprobs.dtype)]))

    def finish() -> StepMetrics:
        tokens = _trained_tokens(scored.read(), batch)
        _check_finite(tokens, batch)
        entropies = tokens["entropy"]
        own = {"policy/entropy": Stat.mean(entropies.sum(dtype=np.float64), entropies.size)}
        mismatch = token_mismatch(tokens["policy"], tokens["rollout"], cap=correction_cap, old_n=tokens.get("old"))
        return StepMetrics.merged([loss_metrics, mismatch, StepMetrics(stats=own)])

    return value, finish


def _trained_tokens(scored: torch.Tensor, batch: PackedBatch) -> dict[str, np.ndarray]:
    """Name → [n] values at the trained positions, row by row; `scored` are log-probabilities and entropies."""
    fields = {"policy": scored[0], "rollout": batch.rollout_logprobs, "entropy": scored[1]}
    if batch.old_logprobs is not None:
        fields["old"] = batch.old_logprobs
    if batch.ref_logprobs is not None:
        fields["reference"] = batch.ref_logprobs
    return {name: values.to(scored.dtype)[batch.response_mask].numpy() for name, values in fields.items()}


def _check_finite(tokens: dict[str, np.ndarray], batch: PackedBatch) -> None:
    for name, values in tokens.items():
        bad = np.flatnonzero(~np.isfinite(values))
        if bad.size:
            raise NonFiniteLogprobs(
                f"{bad.size} of {values.size} trained tokens have a non-finite {name} value: "
                f"{_describe(bad[:_NAMED_TOKENS], values, batch)}; the step is stopped before its weights are touched"
            )


def _describe(bad: np.ndarray, values: np.ndarray, batch: PackedBatch) -> str:
    """E.g. ``"e0.addition-17/3 token 12 (nan)"``, where token 0 is the first prompt token."""
    rows, columns = (index.cpu().numpy() for index in batch.response_mask.nonzero(as_tuple=True))
    parts = []
    for index in bad:
        row, column = int(rows[index]), int(columns[index])
        sample_id = batch.sample_ids[row][int(batch.doc_ids[row, column]) - 1]
        # Label-aligned: the label at a position is the token after it.
        parts.append(f"{sample_id} token {int(batch.position_ids[row, column]) + 1} ({values[index]})")
    return ", ".join(parts)
