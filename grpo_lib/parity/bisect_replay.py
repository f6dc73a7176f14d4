"""Take stored steps with any number of trainers, each judged against an independent model, until one is wrong.

What the engine stored with the samples is judged along the way, under the weights that it should have had.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from grpo_lib import loop
from grpo_lib.config import RunConfig
from grpo_lib.interfaces import ReplayTrainer
from grpo_lib.parity.bisect import Diagnosis, Reference
from grpo_lib.parity.bisect_layers import Layers, layer_differences, layer_rows, parting
from grpo_lib.parity.bisect_scores import Scores, bisect_scores, first_apart, largest_apart, usual_apart
from grpo_lib.parity.bisect_training import (
    TakenStep,
    bisect_gradient,
    bisect_head,
    bisect_update,
    gradient_distance,
    take_step,
    update_distance,
)
from grpo_lib.parity.probe import ENGINE_DECODE
from grpo_lib.parity.replay import StateReader
from grpo_lib.parity.replay_inputs import ReplayBatch
from grpo_lib.types import TRAINING_STATE, PackedBatch, StateKind, StepPlan

# (version that is right, version → reader of its weights) → the independent model
MakeReference = Callable[[int, Mapping[int, Callable[[str], torch.Tensor]]], Reference]

LAYER_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}  # relative difference of a token's hidden state that is rounding

_KEPT_VERSIONS = 3
_OVER_DRIFT = 30.0  # multiple of the 95th percentile of differences; drift's largest was 5 … 16 times that


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedStep:
    """One step of a trainer, or the stored samples of a step, against the independent model."""

    step: int
    name: str
    version: int  # before the step
    num_tokens: int
    logprob_max_abs: float
    tolerance: float  # of the log-probabilities
    gradient_relative: float = math.nan  # NaN where the log-probabilities are wrong already, and for stored samples
    update_relative: float = math.nan  # from AdamW on the trainer's own gradient; NaN for stored samples
    diagnosis: Diagnosis


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredScores:
    """Log-probabilities that were stored with a step's samples, and the samples packed."""

    scores: Scores
    batches: tuple[PackedBatch, ...]
    agreed: bool  # whether the run itself found them equal to its trainer's at that step


ReadStored = Callable[[ReplayBatch, int], StoredScores]  # of a step's samples by one policy version


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySide:
    """A trainer with its own configuration."""

    trainer: ReplayTrainer
    config: RunConfig


def bisect_replay(
    sides: Sequence[ReplaySide],
    batches: Sequence[ReplayBatch],
    *,
    scratch: Path,
    read: StateReader,
    make_reference: MakeReference,
    read_stored: ReadStored | None = None,
    first_judged: int = 1,
) -> tuple[JudgedStep, ...]:
    """Every step from the first side's state, up to the first step in which somebody is wrong.

    Each step is taken once: a mistake that leaves a trace outside of the dumped state cannot blur a second attempt.

    Args:
        sides: One or more; the first holds the state that the first step starts from and carries it along.
        batches: Stored steps. One without trainable tokens is not applied.
        scratch: Existing folder that the driver and all ranks see; keeps the first state and the last three.
        read: Opens what `dump_state` wrote.
        read_stored: Gives what the engine stored, which is then judged too; its weights are the first side's.
        first_judged: Earlier steps are only taken, by the first side.
    """
    leader, config = sides[0].trainer, sides[0].config
    versions: dict[int, Path] = {}
    judged: list[JudgedStep] = []
    for batch in batches:
        version = leader.policy_version
        versions[version] = start = scratch / f"version-{version:06d}"
        leader.dump_state(start, TRAINING_STATE)
        _forget(versions)
        if batch.step < first_judged:
            _advance(leader, config, batch)
            continue
        weights = {number: read(folder, StateKind.WEIGHT) for number, folder in versions.items()}
        reference = make_reference(version, weights)
        taken = [] if read_stored is None else [_judge_stored(batch, read_stored(batch, version), reference, config)]
        # The leader last: its state after the step is where the next one starts.
        for side in reversed(sides):
            plan = loop.plan_rollouts(side.config, side.trainer.num_ranks, batch.rollouts)
            if plan is not None:
                taken.append(
                    _judge(side, plan, batch.step, reference, start=start, folder=scratch / "taken", read=read)
                )
        judged += taken
        if any(step.diagnosis.findings for step in taken):
            break
    return tuple(judged)


def _advance(leader: ReplayTrainer, config: RunConfig, batch: ReplayBatch) -> None:
    plan = loop.plan_rollouts(config, leader.num_ranks, batch.rollouts)
    if plan is not None:
        loop.forward_backward(config, leader, plan)
        leader.optim_step()


def _judge_stored(batch: ReplayBatch, stored: StoredScores, reference: Reference, config: RunConfig) -> JudgedStep:
    """The weights are replayed, and training amplifies rounding: after twenty steps they are 1e-4 nats from the run's.

    Where the run itself found engine and trainer equal, a difference that many tokens share is such drift; samples that
    were put in afterwards stand out from it.
    """
    tolerance = config.parity.max_abs
    if stored.agreed:
        tolerance = max(tolerance, _OVER_DRIFT * usual_apart(stored.scores, stored.batches, reference))
    scored = bisect_scores({ENGINE_DECODE: stored.scores}, stored.batches, reference, tolerance=tolerance)
    return JudgedStep(
        step=batch.step,
        name=ENGINE_DECODE,
        version=reference.version,
        num_tokens=sum(len(values) for values in stored.scores.values()),
        logprob_max_abs=largest_apart(stored.scores, stored.batches, reference),
        tolerance=tolerance,
        diagnosis=scored,
    )


def _forget(versions: dict[int, Path]) -> None:
    """Leave the first version and the last few: the ones that a scorer may have stayed at."""
    for version in sorted(versions)[1:-_KEPT_VERSIONS]:
        shutil.rmtree(versions.pop(version))


def _judge(
    side: ReplaySide,
    plan: StepPlan,
    step: int,
    reference: Reference,
    *,
    start: Path,
    folder: Path,
    read: StateReader,
) -> JudgedStep:
    taken = take_step(side.trainer, plan, config=side.config, start=start, folder=folder, read=read)
    parity = side.config.parity
    largest = largest_apart(taken.scores, taken.batches, reference)
    gradient_relative = math.nan
    if largest <= parity.replay_max_abs:
        gradient = gradient_distance(taken, reference)
        gradient_relative = gradient.whole.relative
        parts = [bisect_gradient(taken, reference, gradient)]
    else:
        # A gradient from wrong log-probabilities is wrong too, and tells of nothing more but the head's tie.
        parts = [_bisect_wrong_scores(side, taken, reference, start), bisect_head(taken, reference)]
    update = update_distance(taken)
    parts.append(bisect_update(taken, update))
    shutil.rmtree(folder)
    return JudgedStep(
        step=step,
        name=taken.name,
        version=taken.version_before,
        num_tokens=plan.num_trained_tokens,
        logprob_max_abs=largest,
        tolerance=parity.replay_max_abs,
        gradient_relative=gradient_relative,
        update_relative=update.whole.relative,
        diagnosis=Diagnosis.merged(parts),
    )


def _bisect_wrong_scores(side: ReplaySide, taken: TakenStep, reference: Reference, start: Path) -> Diagnosis:
    trainer = side.trainer
    tolerance = side.config.parity.replay_max_abs
    scored = bisect_scores({taken.name: taken.scores}, taken.batches, reference, tolerance=tolerance)
    after = start.with_name(f"{start.name}-after")
    trainer.dump_state(after, TRAINING_STATE)
    trainer.restore_state(start)
    found = with_layers(scored, trainer, taken.plan, taken.scores, reference, side.config)
    trainer.restore_state(after)
    shutil.rmtree(after)
    return found


def with_layers(
    scored: Diagnosis,
    trainer: ReplayTrainer,
    plan: StepPlan,
    scores: Scores,
    reference: Reference,
    config: RunConfig,
) -> Diagnosis:
    """The diagnosis of a trainer's scores, with the layer where its hidden states part and the table of all layers.

    One micro-batch of each rank is compared, the one with the first document that differs: hidden states of all layers
    are large.

    Args:
        trainer: Holding the weights that the reference holds.
    """
    batches = tuple(batch for rank in plan.micro_batches for batch in rank)
    place = first_apart(scores, batches, reference, tolerance=config.parity.replay_max_abs)
    if place is None:
        return scored
    index = place.micro_batch % len(plan.micro_batches[0])
    part = replace(plan, micro_batches=tuple((rank[index],) for rank in plan.micro_batches))
    compared = [rank[0] for rank in part.micro_batches]
    own: list[Layers] = [layers for rank in trainer.hidden_states(part) for layers in rank]
    right: list[Layers] = [reference.hidden_states(batch) for batch in compared]
    differences = layer_differences(compared, own, right, tolerance=LAYER_TOLERANCE[config.model.dtype])
    findings = tuple(
        replace(f, where=f"{f.where}; {parting(differences)}") if f.subject == trainer.name else f
        for f in scored.findings
    )
    return Diagnosis(findings=findings, tables={**scored.tables, "layers": layer_rows(trainer.name, differences)})
