"""The forward and backward passes of a step over one rank's micro-batches: the part that no backend has of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from grpo_lib.algo.objective import deferred_objective
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
    finishers = []
    for index, batch in enumerate(micro_batches):
        logprobs, entropy = forward(batch)
        value, finish = deferred_objective(
            logprobs,
            entropy,
            batch,
            loss,
            loss_denominator=loss_denominator,
            correction_cap=correction_cap,
        )
        backward(value, index == len(micro_batches) - 1)
        finishers.append(finish)
    # Only now does the host look at what the forward passes gave, while the last backward pass goes on. A rank that
    # found a bad value has joined every one by then, and all of them fail together.
    parts, failure = [], None
    for finish in finishers:
        try:
            parts.append(finish())
        except NonFiniteLogprobs as error:
            failure = failure or str(error)
    error = failures_of_ranks(failure, device)
    if error is not None:
        drop()
        raise error
    return StepMetrics.merged(parts)
