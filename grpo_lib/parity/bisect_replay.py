"""Walk two trainers in lockstep to the first step where they part, and examine both there."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from grpo_lib import loop
from grpo_lib.config import RunConfig
from grpo_lib.interfaces import ReplayTrainer
from grpo_lib.parity.bisect import Diagnosis, Reference
from grpo_lib.parity.bisect_layers import Layers, layer_differences, layer_rows
from grpo_lib.parity.bisect_training import TakenStep, bisect_step, take_step
from grpo_lib.parity.replay import ReplayStep, StateReader, lockstep
from grpo_lib.parity.replay_inputs import ReplayBatch
from grpo_lib.parity.replay_verdicts import lockstep_checks
from grpo_lib.types import TRAINING_STATE, PackedBatch, ParityVerdict, StateKind

# (version that is right, version → reader of its weights) → the independent model
MakeReference = Callable[[int, Mapping[int, Callable[[str], torch.Tensor]]], Reference]

LAYER_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}  # relative difference of a token's hidden state that is rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """What the walk found."""

    steps: tuple[ReplayStep, ...]  # all that were taken; the last one parts, where any does
    parted: bool
    diagnosis: Diagnosis


def bisect_lockstep(
    leader: ReplayTrainer,
    follower: ReplayTrainer,
    batches: Sequence[ReplayBatch],
    *,
    config: RunConfig,
    scratch: Path,
    read: StateReader,
    make_reference: MakeReference,
    follower_config: RunConfig | None = None,
) -> Parting:
    """Both trainers are judged against the independent model, whichever of them is wrong.

    Args:
        batches: Stored steps; the leader holds the state that the first of them starts from.
        config: Of the leader.
        scratch: Existing folder that the driver and all ranks see; holds the weights of every version on the way.
        read: Opens what `dump_state` wrote.
        follower_config: Where the follower's differs.
    """
    steps: list[ReplayStep] = []
    versions: dict[int, Path] = {}
    configs = (config, follower_config or config)
    for batch in batches:
        start = scratch / f"version-{leader.policy_version:06d}"
        leader.dump_state(start, TRAINING_STATE)
        versions[leader.policy_version] = start
        version = leader.policy_version
        taken = list(
            lockstep(
                leader, follower, [batch], config=config, follower_config=follower_config, scratch=scratch, read=read
            )
        )
        steps += taken
        if any(_parts(step, configs) for step in taken):
            weights = {number: read(folder, StateKind.WEIGHT) for number, folder in versions.items()}
            reference = make_reference(version, weights)
            examined = _examine((leader, follower), configs, batch, reference, start, scratch, read)
            return Parting(steps=tuple(steps), parted=True, diagnosis=examined)
    return Parting(steps=tuple(steps), parted=False, diagnosis=Diagnosis())


def _parts(step: ReplayStep, configs: Sequence[RunConfig]) -> bool:
    checks = lockstep_checks([step], configs[0].parity, configs[0].trainer, stored={step.step: step.content_digest})
    return any(check.verdict is ParityVerdict.FAIL for check in checks)


def _examine(
    trainers: Sequence[ReplayTrainer],
    configs: Sequence[RunConfig],
    batch: ReplayBatch,
    reference: Reference,
    start: Path,
    scratch: Path,
    read: StateReader,
) -> Diagnosis:
    parts = []
    for side, (trainer, config) in enumerate(zip(trainers, configs, strict=True)):
        plan = loop.plan_rollouts(config, trainer.num_ranks, batch.rollouts)
        assert plan is not None, "a step that parted was trained"
        folder = scratch / f"examined-{side}"
        taken = take_step(trainer, plan, config=config, start=start, folder=folder, read=read)
        part = bisect_step(taken, reference)
        if part.findings:
            part = Diagnosis.merged([part, _layers(trainer, taken, reference, start, config)])
        parts.append(part)
        shutil.rmtree(folder)
    return Diagnosis.merged(parts)


def _layers(
    trainer: ReplayTrainer, taken: TakenStep, reference: Reference, start: Path, config: RunConfig
) -> Diagnosis:
    """The table of hidden states under the weights before the step."""
    trainer.restore_state(start)
    own = [layers for rank in trainer.hidden_states(taken.plan) for layers in rank]
    right = reference_layers(reference, taken.batches)
    differences = layer_differences(taken.batches, own, right, tolerance=LAYER_TOLERANCE[config.model.dtype])
    return Diagnosis(tables={"layers": layer_rows(taken.name, differences)})


def reference_layers(reference: Reference, batches: Sequence[PackedBatch]) -> list[Layers]:
    """Of each micro-batch, by the model as configured."""
    return [reference.hidden_states(batch) for batch in batches]
