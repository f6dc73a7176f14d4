"""The forward and backward passes of a step over one rank's micro-batches: the part that no backend has of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from grpo_lib.algo.objective import micro_batch_objective
from grpo_lib.errors import NonFiniteLogprobs
from grpo_lib.interfaces import PolicyLoss
from grpo_lib.trainers.rank_group import failures_of_ranks
from grpo_lib.types import PackedBatch, StepMetrics


def accumulate_gradients(
    micro_batches: Sequence[PackedBatch],
    loss: PolicyLoss,
    *,
    forward: Callable[[PackedBatch], tuple[torch.Tensor, torch.Tensor]],
    backward: Callable[[torch.Tensor, bool], None],
    drop: Callable[[], None],
    device: torch.device,
    loss_denominator: float,
    correction_cap: float,
) -> StepMetrics:
    """One backward pass for each micro-batch; collective.

    Args:
        forward: Log-probabilities and entropies [B, T] of the trained tokens.
        backward: Called with each micro-batch's loss, and whether it is the last.
        drop: Forget the accumulated gradients.

    Raises:
        NonFiniteLogprobs: on every rank when any rank has one; gradients are dropped.
    """
    parts, failure = [], None
    for index, batch in enumerate(micro_batches):
        logprobs, entropy = forward(batch)
        try:
            value, metrics = micro_batch_objective(
                logprobs,
                entropy,
                batch.to(device),
                loss,
                loss_denominator=loss_denominator,
                correction_cap=correction_cap,
            )
            parts.append(metrics)
        except NonFiniteLogprobs as error:
            # The other ranks are on their way into this backward pass: join it, then fail together.
            failure, value = failure or str(error), logprobs.sum() * 0
        backward(value, index == len(micro_batches) - 1)
    error = failures_of_ranks(failure, device)
    if error is not None:
        drop()
        raise error
    return StepMetrics.merged(parts)
