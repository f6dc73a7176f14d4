"""Free-running replay: a trainer takes the stored steps one after the other, carrying its own weights along.

Training amplifies rounding, so two correct trainers part, and by how much depends on model, data and learning rate.
The yardstick, the noise floor, is therefore measured in place: each backend against itself, with the same samples in
other numbers of micro-batches. That changes the order of sums and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType

import numpy as np

from grpo_lib import loop
from grpo_lib.algo.packing import plan_step
from grpo_lib.config import RunConfig
from grpo_lib.errors import DataError
from grpo_lib.interfaces import ReplayTrainer
from grpo_lib.parity.distances import StateDistance
from grpo_lib.parity.probe import PairStatistics, compare
from grpo_lib.parity.replay import StateReader, score_plan, weight_distance
from grpo_lib.parity.replay_inputs import ReplayBatch, plan_digest
from grpo_lib.types import StateKind, StepPlan


class Split(StrEnum):
    """How a step is cut into micro-batches."""

    CONFIGURED = "configured"
    HALVES = "halves"  # of the packs that a configured micro-batch has; pairs where it is a single pack
    SINGLES = "singles"  # one pack each: the order of sums that is farthest from the configured one


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrajectoryStep:
    """One step of one trainer on its own way."""

    step: int
    policy_version: int  # before the step
    version_after: int
    inputs: str  # sha256 of the documents
    num_micro_batches: int  # of each rank
    logprobs: Mapping[str, np.ndarray]  # sample id → [R] float32, before the step
    loss: float
    grad_norm: float
    learning_rate: float
    moved: bool
    weights: Path  # folder of the dump after the step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """All trained steps of one trainer, from the state that it held at the start."""

    name: str
    split: Split
    steps: tuple[TrajectoryStep, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeStep:
    """The same step of two trajectories; b is the reference."""

    step: int
    name_a: str
    name_b: str
    inputs_a: str
    inputs_b: str
    pair: PairStatistics  # log-probabilities of the response tokens before the step
    loss_a: float
    loss_b: float
    grad_norm_a: float
    grad_norm_b: float
    learning_rate_a: float
    learning_rate_b: float
    policy_version: int  # before the step, b's
    version_after_a: int
    version_after_b: int
    moved_a: bool
    moved_b: bool
    weight: StateDistance  # after the step


def free_running(
    trainer: ReplayTrainer,
    steps: Sequence[ReplayBatch],
    *,
    config: RunConfig,
    folder: Path,
    split: Split = Split.CONFIGURED,
) -> Trajectory:
    """Train on the stored steps from whatever state the trainer holds.

    The weights after every step are kept in `folder`, so that trajectories can be compared of trainers that did not run
    at the same time: steps × parameters × 4 bytes. A step without trainable tokens is not applied and has no entry.

    Args:
        folder: Existing folder that the driver and all ranks see.
        split: Any other than the configured one is for the noise floor.

    Raises:
        DataError: a step cannot be cut into another number of micro-batches.
    """
    taken = []
    for batch in steps:
        plan = loop.plan_rollouts(config, trainer.num_ranks, batch.rollouts)
        if plan is None:
            continue
        if split is not Split.CONFIGURED:
            plan = resplit(config, batch, plan, split)
        taken.append(_take(trainer, batch.step, plan, config, folder / f"step-{batch.step:06d}"))
    return Trajectory(name=trainer.name, split=split, steps=tuple(taken))


def _take(trainer: ReplayTrainer, step: int, plan: StepPlan, config: RunConfig, weights: Path) -> TrajectoryStep:
    version = trainer.policy_version
    logprobs = score_plan(trainer, plan)
    trained = loop.forward_backward(config, trainer, plan).values()
    stepped = trainer.optim_step().values()
    trainer.dump_state(weights, [StateKind.WEIGHT])
    return TrajectoryStep(
        step=step,
        policy_version=version,
        version_after=trainer.policy_version,
        inputs=plan_digest(plan),
        num_micro_batches=len(plan.micro_batches[0]),
        logprobs=logprobs,
        loss=trained["loss/policy"],
        grad_norm=stepped["optim/grad_norm"],
        learning_rate=stepped["optim/lr"],
        moved=stepped["optim/weights_moved"] > 0,
        weights=weights,
    )


def noise_splits(config: RunConfig, num_ranks: int, steps: Sequence[ReplayBatch]) -> tuple[Split, ...]:
    """The splits that the noise floor is measured with; `SINGLES` only where it differs from `HALVES`."""
    plans = [loop.plan_rollouts(config, num_ranks, batch.rollouts) for batch in steps]
    widest = max((_packs(plan) for plan in plans if plan is not None), default=1)
    return (Split.HALVES, Split.SINGLES) if widest > 2 else (Split.HALVES,)


def resplit(config: RunConfig, batch: ReplayBatch, plan: StepPlan, split: Split) -> StepPlan:
    """The same samples on the same ranks, in another number of micro-batches.

    Raises:
        DataError: a rank has one pack in all, so there is only one way to cut it.
    """
    packs = _packs(plan)
    other = plan_step(
        loop.trainable_samples(config, batch.rollouts),
        num_ranks=len(plan.micro_batches),
        pack_length=config.trainer.pack_length,
        micro_batch_packs=2 if packs == 1 else 1 if split is Split.SINGLES else math.ceil(packs / 2),
    )
    if len(other.micro_batches[0]) == len(plan.micro_batches[0]):
        raise DataError(
            f"step {batch.step} gives each of {len(plan.micro_batches)} ranks one pack of trainer.pack_length "
            f"({config.trainer.pack_length}) tokens: there is no other split to measure the noise floor with; replay "
            "with a smaller trainer.pack_length or fewer trainer.num_ranks, or steps with more rollouts"
        )
    return other


def _packs(plan: StepPlan) -> int:
    """Of each micro-batch."""
    return plan.micro_batches[0][0].num_rows


def compare_trajectories(a: Trajectory, b: Trajectory, *, cap: float, read: StateReader) -> tuple[FreeStep, ...]:
    """Step by step, with b as the reference.

    Args:
        cap: Ratio above which the clip counts count.
        read: Opens the dumped weights.

    Raises:
        DataError: the two did not take the same steps on the same samples.
    """
    steps_a, steps_b = ([step.step for step in trajectory.steps] for trajectory in (a, b))
    if steps_a != steps_b:
        raise DataError(f"{a.name} took the steps {steps_a} and {b.name} {steps_b}; replay the same ones with both")
    return tuple(
        FreeStep(
            step=of_a.step,
            name_a=a.name,
            name_b=b.name,
            inputs_a=of_a.inputs,
            inputs_b=of_b.inputs,
            pair=compare(a.name, of_a.logprobs, b.name, of_b.logprobs, cap=cap),
            loss_a=of_a.loss,
            loss_b=of_b.loss,
            grad_norm_a=of_a.grad_norm,
            grad_norm_b=of_b.grad_norm,
            learning_rate_a=of_a.learning_rate,
            learning_rate_b=of_b.learning_rate,
            policy_version=of_b.policy_version,
            version_after_a=of_a.version_after,
            version_after_b=of_b.version_after,
            moved_a=of_a.moved,
            moved_b=of_b.moved,
            weight=weight_distance(of_a.weights, of_b.weights, read),
        )
        for of_a, of_b in zip(a.steps, b.steps, strict=True)
    )


# What is compared of a step, in the order of the report's table.
QUANTITIES: Mapping[str, Callable[[FreeStep], float]] = MappingProxyType(
    {
        "max |dlogprob|": lambda step: math.nan if step.pair.nan_count else step.pair.max_abs,
        "mean |dlogprob|": lambda step: math.nan if step.pair.nan_count else step.pair.mean_abs,
        "relative weight distance": lambda step: step.weight.whole.relative,
        "loss": lambda step: abs(step.loss_a - step.loss_b),
        "gradient norm": lambda step: abs(step.grad_norm_a - step.grad_norm_b),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeRunning:
    """Two trainers on their own ways, and each of them against itself with other splits."""

    steps: tuple[FreeStep, ...]
    floors: tuple[tuple[FreeStep, ...], ...]

    @property
    def pair(self) -> str:
        return f"{self.steps[0].name_a} vs {self.steps[0].name_b}"

    def floor(self, quantity: str) -> tuple[float, ...]:
        """Noise floor of each step: the largest difference of either backend with itself up to that step.

        Single steps scatter: two trajectories that have parted may agree by chance on the tokens of one step. How far
        they have parted does not shrink, so the largest so far is taken.
        """
        measure = QUANTITIES[quantity]
        values = np.array([[measure(step) for step in floor] for floor in self.floors])
        return tuple(np.maximum.accumulate(values.max(axis=0)).tolist())
