"""One training step again, from the stored rollouts and the state before it: does the record say what was computed?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lib import loop
from grpo_lib.algo.checksum import checksum_digest
from grpo_lib.errors import DataError
from grpo_lib.pipeline import StepRollouts
from grpo_lib.ray_runtime.actor_group import ActorGroup
from grpo_lib.ray_runtime.trainer_group import RayTrainerGroup
from grpo_lib.stages.checkpoints import newest_complete
from grpo_lib.stages.live import live_trainer
from grpo_lib.stages.stored_run import StoredRun
from grpo_lib.timing import StepTimer
from grpo_lib.types import StepMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedMetric:
    """A metric as it was recorded and as it was computed again."""

    name: str
    recorded: float
    replayed: float

    @property
    def relative(self) -> float:
        """|replayed - recorded| over the larger of the two; 0 when bit-equal, inf when one is not a number."""
        if self.recorded == self.replayed or (math.isnan(self.recorded) and math.isnan(self.replayed)):
            return 0.0
        difference = abs(self.replayed - self.recorded) / max(abs(self.recorded), abs(self.replayed))
        return difference if math.isfinite(difference) else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """The step, where the replay began, and what came out."""

    step: int
    start: str  # "the base model" or the checkpoint's folder
    steps_taken: int  # from there to the step, itself included
    metrics: tuple[ReplayedMetric, ...]
    recorded_weights: str | None  # checksum in the certificate of the version after the step; None without one
    replayed_weights: str

    @property
    def weights_equal(self) -> bool:
        return self.recorded_weights == self.replayed_weights

    def agrees(self, tolerance: float) -> bool:
        """Whether every metric is within `tolerance`, relative; at 0 the weights must be equal to the bit too."""
        close = all(metric.relative <= tolerance for metric in self.metrics)
        return close and (tolerance > 0 or self.weights_equal)


def run(stored: StoredRun, step: int) -> ReplayedStep:
    """Start the run's trainer from the nearest checkpoint before `step`, and train on the stored rollouts up to it.

    Raises:
        DataError: the run has no such step, it was not applied, or a record between checkpoint and step is missing.
    """
    rows = {row["step"]: row for row in stored.metrics()}
    if step not in rows:
        raise DataError(f"run {stored.reference} has no step {step}; it has {min(rows)} to {max(rows)}")
    if not rows[step]["optim/applied"]:
        raise DataError(f"step {step} of run {stored.reference} was not applied: no group had any spread")
    checkpoint, done = _start(stored, before=step)
    with live_trainer(stored.config, model_path=stored.model_path, checkpoint=checkpoint) as (trainer, group):
        trained = StepMetrics()
        for number in range(done + 1, step + 1):
            trained = _train(stored, trainer, number, expected_version=_version_before(rows, number))
        weights = _weights_digest(stored, group)
    return ReplayedStep(
        step=step,
        start="the base model" if checkpoint is None else str(checkpoint),
        steps_taken=step - done,
        metrics=_compared(trained.values(), rows[step]),
        recorded_weights=_recorded_weights(stored, rows[step]["policy_version"]),
        replayed_weights=weights,
    )


def _start(stored: StoredRun, *, before: int) -> tuple[Path | None, int]:
    """(checkpoint, steps done there) of the last whole one before a step; the base model is (None, 0)."""
    point = newest_complete(stored.paths, at_most=before - 1)
    return (None, 0) if point is None else (point.path, point.state.steps_done)


def _version_before(rows: Mapping[int, Mapping[str, Any]], step: int) -> int:
    row = rows.get(step)
    if row is None:
        raise DataError(f"the metrics of step {step} are missing, so what it trained on cannot be checked")
    return int(row["policy_version"]) - int(row["optim/applied"])


def _train(stored: StoredRun, trainer: RayTrainerGroup, step: int, *, expected_version: int) -> StepMetrics:
    """One stored step as the loop took it."""
    if trainer.policy_version != expected_version:
        raise DataError(
            f"step {step} of run {stored.reference} began at policy version {expected_version}, and the replay is at "
            f"{trainer.policy_version}: the checkpoint before it is of another attempt"
        )
    rollouts = stored.rollouts(step)
    plan = loop.plan_rollouts(
        stored.config,
        trainer.num_ranks,
        StepRollouts(groups=rollouts.groups, assessments=rollouts.assessments, num_draws=1),
    )
    return StepMetrics() if plan is None else loop.train_step(stored.config, trainer, plan, StepTimer())


def _weights_digest(stored: StoredRun, group: ActorGroup) -> str:
    """As a certificate has it: over the tensors that a push would send."""
    setting = "deadlines.train_s"
    (tensors, *_) = group.call("shard_report", deadline_s=stored.config.deadlines.train_s, setting=setting)
    return checksum_digest({tensor.hf_name: tensor.checksum for tensor in tensors})


def _recorded_weights(stored: StoredRun, version: int) -> str | None:
    found = [certificate.checksum for certificate in stored.certificates() if certificate.policy_version == version]
    return found[-1] if found else None


def _compared(replayed: Mapping[str, float], row: Mapping[str, Any]) -> tuple[ReplayedMetric, ...]:
    """All that training computes and the row holds; a number that was not observed stands there as null."""
    return tuple(
        ReplayedMetric(name=name, recorded=math.nan if row[name] is None else float(row[name]), replayed=value)
        for name, value in replayed.items()
        if name in row
    )
