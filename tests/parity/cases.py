"""The sabotage table: each mistake, the report that a user runs on it, the cause that must be named, and where.

A trainer's mistake is made in each backend, with the other one, healthy, as the leader of a lockstep replay. A mistake
of the engine is made in what is stored, by a sampler that holds the wrong thing; `test_sabotage_engine` repeats those
on a real engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from grpo_lib.config import with_overrides
from grpo_lib.parity.bisect import Cause
from grpo_lib.types import GroupStatus, RolloutGroup
from tests.parity import saboteurs
from tests.parity.lab import BACKENDS, Lab, Outcome
from tests.parity.local_trainers import PooledTrainer, build_backend
from tests.parity.stored_steps import Sampler, draw_step, stored


@dataclass(frozen=True, kw_only=True)
class Case:
    """One mistake in one place."""

    name: str
    made_in: str
    cause: Cause
    subject: str  # whom bisect must blame
    points_at: Sequence[str]  # texts that its `where` holds
    run: Callable[[Lab], Outcome]

    @property
    def key(self) -> str:
        return f"{self.name} ({self.made_in})"


def _in_trainer(sabotage: Callable[[Lab, str], Any], backend: str) -> Callable[[Lab], Outcome]:
    """Replay of a healthy leader of the other backend with a saboteur of this one."""

    def run(lab: Lab) -> Outcome:
        leader = next(name for name in BACKENDS if name != backend)
        return lab.replay(lab.healthy(leader), lambda: lab.suspect(sabotage(lab, backend)))

    return run


def _trainer_cases(
    name: str,
    cause: Cause,
    points_at: Sequence[str],
    sabotage: Callable[[Lab, str], Any],
    backends: Sequence[str] = BACKENDS,
) -> list[Case]:
    return [
        Case(
            name=name,
            made_in=backend,
            cause=cause,
            subject="suspect",
            points_at=points_at,
            run=_in_trainer(sabotage, backend),
        )
        for backend in backends
    ]


def _patched(patch: Callable[[Any], Any]) -> Callable[[Lab, str], Any]:
    return lambda lab, backend: patch(lab.backend(backend))


def _at_temperature_one(lab: Lab, backend: str) -> Any:
    return build_backend(backend, with_overrides(lab.config, ["rollout.temperature=1"]), lab.model)


def _linear(lab: Lab, backend: str) -> Any:
    return lab.backend(backend, lr_scheduler="linear")


def _untied(lab: Lab, backend: str) -> Any:
    return saboteurs.untie_head(lab.backend(backend), lab.config.trainer.learning_rate)


def _swapped(lab: Lab, backend: str) -> Any:
    one, other = kept_groups(lab, 1)[2:4]
    return saboteurs.SwappedAdvantages(lab.backend(backend), one, other, lab.steps.advantages(1))


def kept_groups(lab: Lab, step: int) -> list[str]:
    batch = lab.steps.batches[step - 1]
    pairs = zip(batch.groups, batch.assessments, strict=True)
    return [group.group_id for group, assessment in pairs if assessment.status is GroupStatus.KEPT]


def _denominator_per_rank(lab: Lab) -> Outcome:
    config = with_overrides(lab.config, ["trainer.num_ranks=2"])
    leader = PooledTrainer(lab.pool, config, lab.model, name="olmo_core")
    return lab.replay(
        leader,
        lambda: PooledTrainer(lab.pool, config, lab.model, name="suspect", saboteur=saboteurs.RankDenominator),
        config=config,
    )


# -- what the engine samples with --------------------------------------------------------------------------------------


def _engine_draws(weights: Callable[[Lab], dict[str, torch.Tensor]]) -> Callable[[Lab], Outcome]:
    """Samples that carry version 2, drawn with other weights, and the probe at version 2."""

    def run(lab: Lab) -> Outcome:
        sampler = Sampler(lab.model)
        sampler.load(weights(lab))
        batch = draw_step(sampler, lab.config, 3, version=2)
        return lab.probe(batch.groups, version=2)

    return run


def _one_version_behind(lab: Lab) -> dict[str, torch.Tensor]:
    return lab.steps.weights(1)


def _norm_not_synced(lab: Lab) -> dict[str, torch.Tensor]:
    name = "model.norm.weight"
    return {**lab.steps.weights(2), name: lab.steps.weights(1)[name]}


def _roots_not_synced(lab: Lab) -> dict[str, torch.Tensor]:
    stale = lab.steps.weights(1)
    return {name: stale[name] if ".layers." not in name else t for name, t in lab.steps.weights(2).items()}


# -- whose rollouts are stored -----------------------------------------------------------------------------------------

REPLACED = (("e0.p2-3", 5), ("e0.p2-11", 0), ("e0.p3-0", 7), ("e0.p3-9", 2))  # 4 of 384: 1 %


def replaced_rollouts(lab: Lab, *, forge_seeds: bool) -> list[Any]:
    """The run's steps with 1 % of the samples taken from another run of the same prompts."""
    theirs = {group.group_id: group for batch in lab.other_run.batches for group in batch.groups}
    changed = []
    for batch in lab.steps.batches:
        groups = []
        for group in batch.groups:
            rollouts = list(group.rollouts)
            for index in (index for group_id, index in REPLACED if group_id == group.group_id):
                foreign = theirs[group.group_id].rollouts[index]
                seed = rollouts[index].completion.seed if forge_seeds else foreign.completion.seed
                rollouts[index] = replace(foreign, completion=replace(foreign.completion, seed=seed))
            groups.append(replace(group, rollouts=tuple(rollouts)))
        changed.append(stored(batch.step, groups, lab.config))
    return changed


def _foreign_by_record(lab: Lab) -> Outcome:
    return lab.replay(
        lab.healthy("olmo_core"),
        lambda: lab.healthy("hf_deepspeed"),
        steps=replaced_rollouts(lab, forge_seeds=False),
        other_run=lab.other_run,
    )


def _foreign_by_score(lab: Lab) -> Outcome:
    groups: tuple[RolloutGroup, ...] = replaced_rollouts(lab, forge_seeds=True)[1].groups
    return lab.probe(groups, version=1)


_FIRST = "document 1 of row 0 of micro-batch 0"
_SECOND = "document 2 of row 0 of micro-batch 0"

CASES: tuple[Case, ...] = (
    *_trainer_cases(
        "document boundaries dropped",
        Cause.BOUNDARIES_DROPPED,
        (_SECOND, "response token 0", "hidden states part at layer 0", "token 0 of document 2 of row 0"),
        _patched(saboteurs.drop_boundaries),
    ),
    *_trainer_cases(
        "document lengths lost",
        Cause.POSITIONS_RUN_ON,
        (_SECOND, "hidden states part at layer 0"),
        _patched(saboteurs.lose_doc_lens),
        ("olmo_core",),
    ),
    *_trainer_cases(
        "RoPE not reset per document",
        Cause.POSITIONS_RUN_ON,
        (_SECOND, "hidden states part at layer 0"),
        _patched(saboteurs.run_positions_on),
        ("hf_deepspeed",),
    ),
    *_trainer_cases(
        "labels shifted by one",
        Cause.LABELS_SHIFTED,
        (_FIRST, "hidden states agree in every layer"),
        _patched(lambda backend: saboteurs.ChangedBatches(backend, saboteurs.labels_one_later)),
    ),
    *_trainer_cases(
        "temperature not applied",
        Cause.TEMPERATURE,
        ("temperature 0.7 not applied", _FIRST, "hidden states agree in every layer"),
        _at_temperature_one,
    ),
    Case(
        name="stale weights in the engine",
        made_in="sampler",
        cause=Cause.STALE_WEIGHTS,
        subject="engine decode",
        points_at=("weights of version 1 instead of 2",),
        run=_engine_draws(_one_version_behind),
    ),
    Case(
        name="root-level parameter not synced",
        made_in="sampler",
        cause=Cause.STALE_TENSORS,
        subject="engine decode",
        points_at=("root-level tensor model.norm.weight of version 1 instead of 2",),
        run=_engine_draws(_norm_not_synced),
    ),
    Case(
        name="no root-level parameter synced",
        made_in="sampler",
        cause=Cause.STALE_TENSORS,
        subject="engine decode",
        points_at=("root-level tensors model.embed_tokens.weight, model.norm.weight of version 1",),
        run=_engine_draws(_roots_not_synced),
    ),
    *_trainer_cases(
        "lm_head untied",
        Cause.HEAD_UNTIED,
        ("model.embed_tokens.weight", "version 0"),
        _untied,
    ),
    Case(
        name="loss denominator per rank",
        made_in="olmo_core, 2 ranks",
        cause=Cause.LOSS_DENOMINATOR,
        subject="suspect",
        points_at=("tokens of each rank (2 of them), summed",),
        run=_denominator_per_rank,
    ),
    *_trainer_cases(
        "loss denominator per micro-batch",
        Cause.LOSS_DENOMINATOR,
        ("tokens of each micro-batch",),
        _patched(saboteurs.OwnDenominators),
        ("olmo_core",),
    ),
    *_trainer_cases(
        "LR schedule linear instead of constant", Cause.LEARNING_RATE, ("step from version 1 to 2",), _linear
    ),
    *_trainer_cases(
        "optimiser step skipped", Cause.STEP_SKIPPED, ("step from version 0 to 1",), _patched(saboteurs.SkippedStep)
    ),
    *_trainer_cases(
        "advantages of two groups swapped",
        Cause.ADVANTAGES_SWAPPED,
        ("groups e0.p1-2 and e0.p1-3",),
        _swapped,
    ),
    *_trainer_cases(
        "bf16 master weights",
        Cause.ROUNDED_MASTERS,
        ("weights of version 1, all 24 tensors",),
        _patched(saboteurs.Bf16Masters),
    ),
    Case(
        name="1 % of rollouts another run's",
        made_in="store",
        cause=Cause.FOREIGN_ROLLOUTS,
        subject="stored rollouts",
        points_at=tuple(f"{group_id}/{index}" for group_id, index in REPLACED),
        run=_foreign_by_record,
    ),
    Case(
        name="1 % of rollouts another run's, seeds forged",
        made_in="store",
        cause=Cause.FOREIGN_ROLLOUTS,
        subject="engine decode",
        points_at=("e0.p2-3/5", "e0.p2-11/0"),
        run=_foreign_by_score,
    ),
)
