"""What the sabotage suite works with: stored steps, healthy trainers, the real reports and the real bisect."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from grpo_lib.config import RunConfig
from grpo_lib.interfaces import ReplayTrainer
from grpo_lib.parity.bisect import Diagnosis, with_diagnosis
from grpo_lib.parity.bisect_records import bisect_inputs
from grpo_lib.parity.bisect_replay import ReplaySide, bisect_replay
from grpo_lib.parity.bisect_scores import bisect_scores
from grpo_lib.parity.probe import Scorer, StoredLogprobs, probe
from grpo_lib.parity.replay import lockstep
from grpo_lib.parity.replay_inputs import ReplayBatch, audit_inputs
from grpo_lib.parity.report import probe_report, replay_report
from grpo_lib.stages.replay_files import StateFile
from grpo_lib.stages.scorers import ScoredBefore, ScoredByTrainer, scoring_plan, stored_documents
from grpo_lib.trainers.hf_reference import HfReference
from grpo_lib.types import PackedBatch, ParityReport, RolloutGroup
from tests.distributed.gloo_ranks import RankPool
from tests.parity.local_trainers import LocalTrainer, build_backend
from tests.parity.stored_steps import StoredSteps, store_steps
from tests.tiny_models import make_tiny_model

BACKENDS = ("olmo_core", "hf_deepspeed")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a user gets: the report with the diagnosis in it."""

    report: ParityReport
    diagnosis: Diagnosis

    @staticmethod
    def of(report: ParityReport, diagnosis: Diagnosis) -> Outcome:
        return Outcome(report=with_diagnosis(report, diagnosis), diagnosis=diagnosis)


def samples_by_tokens(run: StoredSteps) -> dict[tuple[int, ...], str]:
    """Prompt and response ids → sample id."""
    return {
        (*group.prompt.token_ids, *rollout.completion.token_ids.tolist()): group.sample_id(rollout.sample_index)
        for batch in run.batches
        for group in batch.groups
        for rollout in group.rollouts
    }


class Lab:
    """Two small runs from one base model, and what is needed to compare trainers and scorers on them.

    Args:
        folder: For models and dumped states.
        pool: Two ranks, for the mistakes that need them.
    """

    def __init__(self, folder: Path, pool: Callable[[], RankPool]) -> None:
        self._folder, self._make_pool = folder, pool
        self._scratch = itertools.count()
        self.model = make_tiny_model(folder / "model", "qwen3_tied")
        self.steps = store_steps(self.model, folder / "run", seed=1)
        self.config = self.steps.config
        self._leaders: dict[str, LocalTrainer] = {}

    @property
    def pool(self) -> RankPool:
        return self._make_pool()

    @cached_property
    def other_run(self) -> StoredSteps:
        """The same prompts and base model under another seed."""
        return store_steps(self.model, self._folder / "other", seed=2)

    def healthy(self, name: str) -> LocalTrainer:
        """A correct trainer, built once."""
        if name not in self._leaders:
            self._leaders[name] = LocalTrainer(self.backend(name), self.config, name=name)
        return self._leaders[name]

    def backend(self, name: str, **options: Any) -> Any:
        """A real backend; options change its trainer settings."""
        return build_backend(name, self.config, self.model, **options)

    def suspect(self, backend: Any) -> LocalTrainer:
        return LocalTrainer(backend, self.config, name="suspect")

    def reference(self, version: int, weights: Mapping[int, Callable[[str], torch.Tensor]]) -> HfReference:
        return HfReference(
            self.model,
            dtype=self.config.model.dtype,
            temperature=self.config.rollout.temperature,
            version=version,
            weights=weights,
        )

    def scratch(self) -> Path:
        folder = self._folder / f"scratch-{next(self._scratch)}"
        folder.mkdir()
        return folder

    def replay_report(
        self,
        leader: ReplayTrainer,
        follower: ReplayTrainer,
        *,
        config: RunConfig | None = None,
        steps: Sequence[ReplayBatch] | None = None,
    ) -> ParityReport:
        """`grpo parity replay --mode lockstep`."""
        config, steps = config or self.config, steps or self.steps.batches
        leader.restore_state(self.steps.versions[0])
        taken = list(lockstep(leader, follower, steps, config=config, scratch=self.scratch(), read=StateFile))
        digests = {batch.step: batch.content_digest for batch in steps}
        return replay_report(config, lockstep=[taken], free=(), audits=audit_inputs(steps, config), stored=digests)

    def replay(
        self,
        leader: ReplayTrainer,
        make_follower: Callable[[], ReplayTrainer],
        *,
        config: RunConfig | None = None,
        steps: Sequence[ReplayBatch] | None = None,
        other_run: StoredSteps | None = None,
    ) -> Outcome:
        """The report, then `grpo parity bisect`: two commands, each with a fresh follower.

        Args:
            other_run: Where foreign samples may come from.
        """
        config, steps = config or self.config, steps or self.steps.batches
        report = self.replay_report(leader, make_follower(), config=config, steps=steps)
        leader.restore_state(self.steps.versions[0])
        sides = [ReplaySide(trainer=trainer, config=config) for trainer in (leader, make_follower())]
        judged = bisect_replay(sides, steps, scratch=self.scratch(), read=StateFile, make_reference=self.reference)
        inputs = bisect_inputs(
            audit_inputs(steps, config),
            groups=[group for batch in steps for group in batch.groups],
            other_run=None if other_run is None else samples_by_tokens(other_run),
        )
        return Outcome.of(report, Diagnosis.merged([inputs, *(step.diagnosis for step in judged)]))

    def probe_report(self, groups: Sequence[RolloutGroup], scorers: Sequence[Scorer], *, version: int) -> ParityReport:
        """`grpo parity probe` with given scorers."""
        pairs = probe(groups, scorers, policy_version=version, cap=self.config.algorithm.correction_cap)
        return probe_report(self.config, pairs=pairs, metrics=self.steps.metrics, engine_scores=False)

    def scorers(self, groups: Sequence[RolloutGroup], *, version: int) -> list[Scorer]:
        """What is stored, and healthy trainers that hold the weights of a version."""
        scorers: list[Scorer] = [StoredLogprobs()]
        for name in BACKENDS:
            self.healthy(name).restore_state(self.steps.versions[version])
            by_trainer = ScoredByTrainer(name=name, trainer=self.healthy(name), config=self.config.trainer)
            scorers.append(ScoredBefore(name=name, scores=by_trainer.score(groups)))
        return scorers

    def probe(self, groups: Sequence[RolloutGroup], *, version: int) -> Outcome:
        """The report on stored samples of a version, and bisect of the same scores."""
        scorers = self.scorers(groups, version=version)
        report = self.probe_report(groups, scorers, version=version)
        found = bisect_scores(
            {scorer.name: scorer.score(groups) for scorer in scorers},
            self.scoring_batches(groups),
            self.reference(version, self.steps.readers()),
            tolerance=self.config.parity.max_abs,
        )
        return Outcome.of(report, found)

    def scoring_batches(self, groups: Sequence[RolloutGroup]) -> tuple[PackedBatch, ...]:
        plan = scoring_plan(stored_documents(groups), self.config.trainer, num_ranks=1)
        return plan.micro_batches[0]
