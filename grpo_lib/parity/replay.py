"""Lockstep replay: two trainers take every stored step from the same weights, moments and version.

Each step is judged alone: before it, the follower is put into the leader's state, so that a difference cannot come
from an earlier one. Side a is the follower and side b the leader, who is the reference in every distance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import numpy as np
import torch

from grpo_lib import loop
from grpo_lib.algo.packing import unpack_tokens
from grpo_lib.config import RunConfig
from grpo_lib.errors import DataError
from grpo_lib.interfaces import ReplayTrainer, TrainerGroup
from grpo_lib.parity.distances import StateDistance, state_distance
from grpo_lib.parity.probe import PairStatistics, compare
from grpo_lib.parity.replay_inputs import ReplayBatch, plan_digest
from grpo_lib.types import TRAINING_STATE, StateKind, StepMetrics, StepPlan


class TensorReader(Protocol):
    """The tensors of one dumped kind, read one at a time."""

    @property
    def names(self) -> Sequence[str]: ...

    def __call__(self, name: str) -> torch.Tensor: ...


StateReader = Callable[[Path, StateKind], TensorReader]  # (folder of `dump_state`, kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayStep:
    """One step taken by two trainers from one state; a is the follower, b the leader."""

    step: int  # of the run whose rollouts were stored
    policy_version: int  # before the step
    name_a: str
    name_b: str
    content_digest: str  # of the stored table
    inputs_a: str  # sha256 of the documents that each side was given
    inputs_b: str
    pair: PairStatistics  # log-probabilities of the response tokens before the step
    loss_a: float  # token mean of the policy loss
    loss_b: float
    grad_norm_a: float  # before clipping, as the trainer reports it
    grad_norm_b: float
    learning_rate_a: float
    learning_rate_b: float
    version_after_a: int
    version_after_b: int
    moved_a: bool  # whether any weight changed, by the dumps and by the trainer's own report
    moved_b: bool
    gradient: StateDistance
    weight: StateDistance  # after the step
    update: StateDistance  # weights after minus before
    bf16_share_a: (
        float  # of the weights that the step moved, those that bfloat16 holds exactly: 2e-5 in fp32, 1 in bf16
    )
    bf16_share_b: float


def lockstep(
    leader: ReplayTrainer,
    follower: ReplayTrainer,
    steps: Sequence[ReplayBatch],
    *,
    config: RunConfig,
    scratch: Path,
    read: StateReader,
    follower_config: RunConfig | None = None,
) -> Iterator[ReplayStep]:
    """Train both on the same stored steps, the follower from the leader's state each time.

    A step without trainable tokens is applied by neither and not yielded. Disk holds the dumps of one step at a time,
    memory two tensors.

    Args:
        config: Of the leader: algorithm, packing, and the cap of the clip counts.
        scratch: Existing folder that the driver and all ranks see.
        read: Opens what `dump_state` wrote.
        follower_config: Where the follower's differs, e.g. in its packing.
    """
    for batch in steps:
        plan_a = loop.plan_rollouts(follower_config or config, follower.num_ranks, batch.rollouts)
        plan_b = loop.plan_rollouts(config, leader.num_ranks, batch.rollouts)
        if plan_a is None or plan_b is None:
            continue
        with TemporaryDirectory(prefix=f"lockstep-{batch.step:06d}-", dir=scratch) as folder:
            a = _Side(trainer=follower, config=follower_config or config, plan=plan_a, folder=Path(folder) / "a")
            b = _Side(trainer=leader, config=config, plan=plan_b, folder=Path(folder) / "b")
            step = _take(batch, a, b, start=Path(folder) / "start", read=read)
        yield step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Side:
    trainer: ReplayTrainer
    config: RunConfig
    plan: StepPlan
    folder: Path


def _take(batch: ReplayBatch, a: _Side, b: _Side, *, start: Path, read: StateReader) -> ReplayStep:
    b.trainer.dump_state(start, TRAINING_STATE)
    a.trainer.restore_state(start)
    version = b.trainer.policy_version
    scored_a, scored_b = (score_plan(side.trainer, side.plan) for side in (a, b))
    metrics_a, metrics_b = (_forward_backward(side) for side in (a, b))
    gradient = _distance(a.folder, b.folder, StateKind.GRADIENT, read)
    metrics_a, metrics_b = {**metrics_a, **_optim_step(a)}, {**metrics_b, **_optim_step(b)}
    update = _update_distance(a.folder, b.folder, start, read)
    return ReplayStep(
        step=batch.step,
        policy_version=version,
        name_a=a.trainer.name,
        name_b=b.trainer.name,
        content_digest=batch.content_digest,
        inputs_a=plan_digest(a.plan),
        inputs_b=plan_digest(b.plan),
        pair=compare(a.trainer.name, scored_a, b.trainer.name, scored_b, cap=b.config.algorithm.correction_cap),
        loss_a=metrics_a["loss/policy"],
        loss_b=metrics_b["loss/policy"],
        grad_norm_a=metrics_a["optim/grad_norm"],
        grad_norm_b=metrics_b["optim/grad_norm"],
        learning_rate_a=metrics_a["optim/lr"],
        learning_rate_b=metrics_b["optim/lr"],
        version_after_a=a.trainer.policy_version,
        version_after_b=b.trainer.policy_version,
        moved_a=metrics_a["optim/weights_moved"] > 0 and update.whole.norm_a > 0,
        moved_b=metrics_b["optim/weights_moved"] > 0 and update.whole.norm_b > 0,
        gradient=gradient,
        weight=weight_distance(a.folder, b.folder, read),
        update=update,
        bf16_share_a=_bf16_share(a.folder, start, read),
        bf16_share_b=_bf16_share(b.folder, start, read),
    )


def score_plan(trainer: TrainerGroup, plan: StepPlan) -> dict[str, np.ndarray]:
    """Sample id → [R] float32 log-probabilities of the trained tokens."""
    return {
        sample_id: values
        for batches, logprobs in zip(plan.micro_batches, trainer.logprobs(plan), strict=True)
        for batch, scores in zip(batches, logprobs, strict=True)
        for sample_id, values in unpack_tokens(batch, scores).items()
    }


def _forward_backward(side: _Side) -> Mapping[str, float]:
    metrics: StepMetrics = loop.forward_backward(side.config, side.trainer, side.plan)
    side.trainer.dump_state(side.folder, [StateKind.GRADIENT])
    return metrics.values()


def _optim_step(side: _Side) -> Mapping[str, float]:
    metrics = side.trainer.optim_step()
    side.trainer.dump_state(side.folder, [StateKind.WEIGHT])
    return metrics.values()


def weight_distance(a: Path, b: Path, read: StateReader) -> StateDistance:
    """Distance of the weights that two folders hold."""
    return _distance(a, b, StateKind.WEIGHT, read)


def _distance(a: Path, b: Path, kind: StateKind, read: StateReader) -> StateDistance:
    read_a, read_b = read(a, kind), read(b, kind)
    return state_distance(common_names(read_a, read_b), read_a, read_b)


def _update_distance(a: Path, b: Path, start: Path, read: StateReader) -> StateDistance:
    after_a, after_b, before = (read(folder, StateKind.WEIGHT) for folder in (a, b, start))
    return state_distance(
        common_names(after_a, after_b),
        lambda name: after_a(name).double() - before(name).double(),
        lambda name: after_b(name).double() - before(name).double(),
    )


def _bf16_share(after: Path, start: Path, read: StateReader) -> float:
    """NaN where nothing moved. Weights that stay are left out: a base model stored in bfloat16 is full of them."""
    read_after, read_before = read(after, StateKind.WEIGHT), read(start, StateKind.WEIGHT)
    moved = exact = 0
    for name in read_after.names:
        weight = read_after(name)
        changed = weight[weight != read_before(name)]
        moved += changed.numel()
        exact += int((changed.bfloat16().to(changed.dtype) == changed).sum())
    return exact / moved if moved else float("nan")


def common_names(a: TensorReader, b: TensorReader) -> list[str]:
    """The tensor names that both hold.

    Raises:
        DataError: one of them lacks a tensor, so the two are not states of one model.
    """
    only = sorted(set(a.names) ^ set(b.names))
    if only:
        raise DataError(f"{len(only)} tensors are in one of the two states only, first {only[0]!r}")
    return sorted(a.names)
