"""A real vLLM engine with the mistakes that an engine or a weight push can make, each behind the reports of a user."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from grpo_lib.config import DeadlinesConfig, RunConfig, RuntimeConfig, WeightSyncConfig, with_overrides
from grpo_lib.parity.bisect import Cause, Diagnosis
from grpo_lib.parity.bisect_records import bisect_certificates
from grpo_lib.parity.bisect_scores import bisect_scores
from grpo_lib.parity.probe import StoredLogprobs, probe
from grpo_lib.parity.report import probe_report
from grpo_lib.parity.verdicts import sync_check
from grpo_lib.ray_runtime.actor_group import ActorGroup
from grpo_lib.ray_runtime.cluster import local_cluster
from grpo_lib.ray_runtime.engine_group import EngineGroup, engine_actors
from grpo_lib.stages.scorers import ScoredBySequence, ScoredByTrainer, scoring_plan, stored_documents
from grpo_lib.trainers.hf_reference import HfReference
from grpo_lib.trainers.hf_scorer import HfScorer
from grpo_lib.types import (
    CanaryResult,
    Completion,
    ParityReport,
    Prompt,
    Rollout,
    RolloutGroup,
    SyncCertificate,
    Verdict,
    VerdictReason,
    VerdictState,
    VersionSpan,
)
from grpo_lib.weight_sync.sync import CertifiedWeightSync
from tests.distributed.engine_parts import EngineFactory, HfTrainer, LocalRank, request, tiny_qwen3
from tests.parity.lab import Outcome
from tests.parity.local_trainers import LocalTrainer, build_backend
from tests.parity.stored_steps import TEMPERATURE, run_config

NORM = "model.norm.weight"
VERSION = 2  # that the engine should hold
GROUP_SIZE = 4
_WAIT = {"deadline_s": 120.0, "setting": "deadlines.generate_s"}


@dataclass(frozen=True, kw_only=True)
class EngineCase:
    """One mistake of an engine or of a push to it."""

    name: str
    made_in: str
    cause: Cause
    subject: str
    points_at: Sequence[str]
    run: Callable[[EngineLab], Outcome]

    @property
    def key(self) -> str:
        return f"{self.name} ({self.made_in})"


class EngineLab:
    """One engine, three versions of a random model, and a trainer that holds the newest."""

    def __init__(self, folder: Path, actors: ActorGroup, engines: EngineGroup, trainer: HfTrainer) -> None:
        self._folder, self._actors, self._engines, self._trainer = folder, actors, engines, trainer
        self.config: RunConfig = with_overrides(run_config(), ["rollout.max_tokens=6", "parity.min_tokens=300"])
        model = version_folder(folder, VERSION)
        self._olmo = LocalTrainer(build_backend("olmo_core", self.config, model), self.config, name="olmo_core")

    def push(self, trainer: HfTrainer, *, canary: Callable[[int], CanaryResult] | None = None) -> SyncCertificate:
        """A certified push of the trainer's weights over a channel of its own."""
        ranks: Any = LocalRank(trainer)  # takes a narrower client than the protocol's, which is the one there is
        sync = CertifiedWeightSync(
            ranks=ranks,
            engines=self._engines,
            config=WeightSyncConfig(),
            deadlines=DeadlinesConfig(),
            canary=canary or (lambda _: CanaryResult(num_tokens=1, max_abs=0, mean_abs=0, tolerance=1, seconds=0)),
        )
        sync.connect()
        return sync.push(trainer.policy_version)

    def load(self, folder: Path, *, labelled: int) -> None:
        """Weights of a folder under whatever version is claimed."""
        self._engines.pause()
        self._engines.load_weights(folder, labelled)
        self._engines.resume()

    def load_version(self, version: int) -> None:
        self.load(version_folder(self._folder, version), labelled=VERSION)

    def load_mixed(self, stale: Sequence[str]) -> None:
        """The newest weights but for tensors of the version before."""
        mixed = self._folder / "mixed"
        mixed.mkdir(exist_ok=True)
        newest, before = (version_folder(self._folder, version) for version in (VERSION, VERSION - 1))
        for path in newest.iterdir():
            (mixed / path.name).write_bytes(path.read_bytes())
        tensors = load_file(newest / "model.safetensors")
        tensors |= {name: load_file(before / "model.safetensors")[name] for name in stale}
        save_file(tensors, mixed / "model.safetensors", metadata={"format": "pt"})
        self.load(mixed, labelled=VERSION)

    def sample(self, *, temperature: float = TEMPERATURE) -> tuple[RolloutGroup, ...]:
        """Groups as the engine draws them, labelled with the version that it claims."""
        prompts = [tuple(range(10 + 5 * p, 16 + 5 * p + p % 4)) for p in range(24)]
        requests = [
            request(f"p{p}/{k}", prompt, seed=100 * p + k, temperature=temperature)
            for p, prompt in enumerate(prompts)
            for k in range(GROUP_SIZE)
        ]
        done: dict[str, Completion] = {}
        self._engines.submit(requests)
        deadline = time.monotonic() + 60
        while len(done) < len(requests):
            assert time.monotonic() < deadline
            done |= {completion.request_id: completion for completion in self._engines.poll(1.0)}
        return tuple(
            _group(f"p{p}", prompt, [done[f"p{p}/{k}"] for k in range(GROUP_SIZE)]) for p, prompt in enumerate(prompts)
        )

    def probe(self, groups: Sequence[RolloutGroup]) -> Outcome:
        """`grpo parity probe` of the stored samples, and bisect."""
        newest = version_folder(self._folder, VERSION)
        plain = HfScorer(newest, dtype="float32", temperature=TEMPERATURE)
        scorers = (
            StoredLogprobs(),
            ScoredByTrainer(name="olmo_core", trainer=self._olmo, config=self.config.trainer),
            ScoredBySequence(name="hf", scorer=plain),
        )
        pairs = probe(groups, scorers, policy_version=VERSION, cap=self.config.algorithm.correction_cap)
        report = probe_report(self.config, pairs=pairs, metrics=(), engine_scores=False)
        plan = scoring_plan(stored_documents(groups), self.config.trainer, num_ranks=1)
        found = bisect_scores(
            {scorer.name: scorer.score(groups) for scorer in scorers},
            plan.micro_batches[0],
            self._reference(),
            tolerance=self.config.parity.max_abs,
        )
        return Outcome.of(report, found)

    def judge_push(self, certificate: SyncCertificate) -> Outcome:
        """The check of a run's certificates, and bisect of them."""
        rows = [{"policy_version": certificate.policy_version, "optim/applied": 0.0}]
        report = ParityReport(checks=(sync_check([certificate], rows),))
        found = bisect_certificates([certificate], pushed=[certificate.policy_version])
        return Outcome.of(report, Diagnosis.merged([found]))

    def without_norm(self) -> HfTrainer:
        """The trainer with a sender that forgets a root-level tensor."""
        return HfTrainer(self._trainer.model, self._trainer.policy_version, left_out=frozenset({NORM}))

    def damaged_canary(self, policy_version: int) -> CanaryResult:
        """Damages what the engine decodes with, after the checksums were taken, and decodes."""
        self._actors.call_one(0, "damage_decoding", **_WAIT)
        groups = self.sample()
        pairs = [(g.prompt.token_ids, r.completion.token_ids) for g in groups for r in g.rollouts]
        scores = np.concatenate(self._trainer.score(pairs, temperature=TEMPERATURE))
        decoded = np.concatenate([r.completion.logprobs for g in groups for r in g.rollouts])
        apart = np.abs(scores - decoded)
        return CanaryResult(
            num_tokens=len(apart),
            max_abs=float(apart.max()),
            mean_abs=float(apart.mean()),
            tolerance=WeightSyncConfig().canary_tolerance,
            seconds=0.0,
        )

    @property
    def trainer(self) -> HfTrainer:
        return self._trainer

    def _reference(self) -> HfReference:
        weights: Mapping[int, Callable[[str], torch.Tensor]] = {
            version: load_file(version_folder(self._folder, version) / "model.safetensors").__getitem__
            for version in range(VERSION + 1)
        }
        newest = version_folder(self._folder, VERSION)
        return HfReference(newest, dtype="float32", temperature=TEMPERATURE, version=VERSION, weights=weights)


def version_folder(folder: Path, version: int) -> Path:
    return folder / f"model-v{version}"


@contextmanager
def engine_lab(folder: Path) -> Iterator[EngineLab]:
    """Start the engine; everything is stopped at the end."""
    trainer = HfTrainer(tiny_qwen3(seed=0))
    for version in range(VERSION + 1):
        if version:
            trainer.change(seed=version)
        trainer.model.save_pretrained(version_folder(folder, version))
    with local_cluster(RuntimeConfig(), num_cpus=1):
        factory = EngineFactory(version_folder(folder, 0), "engine 0", TEMPERATURE)
        actors = engine_actors([factory], num_cpus=1.0, env_vars={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
        try:
            actors.start(deadline_s=280.0, setting="deadlines.engine_start_s")
            yield EngineLab(folder, actors, EngineGroup(actors, deadlines=DeadlinesConfig()), trainer)
        finally:
            actors.close()


def _group(prompt_id: str, prompt: tuple[int, ...], completions: Sequence[Completion]) -> RolloutGroup:
    assert all(
        completion.version_spans == (VersionSpan(version=VERSION, start=0, stop=len(completion.token_ids)),)
        for completion in completions
    )
    return RolloutGroup(
        group_id=f"e0.{prompt_id}",
        prompt=Prompt(prompt_id=prompt_id, text="", token_ids=prompt, answer="", dataset="d", verifier="exact"),
        rollouts=tuple(
            Rollout(
                sample_index=index,
                completion=completion,
                text="",
                verdict=Verdict(state=VerdictState.VALID, reward=0.0, reason=VerdictReason.WRONG),
            )
            for index, completion in enumerate(completions)
        ),
    )


# -- the mistakes ------------------------------------------------------------------------------------------------------


def healthy(lab: EngineLab) -> Outcome:
    """A push without a mistake, and the probe of what the engine then draws."""
    assert lab.push(lab.trainer).ok
    return lab.probe(lab.sample())


def _stale(lab: EngineLab) -> Outcome:
    lab.load_version(VERSION - 1)
    return lab.probe(lab.sample())


def _root_stale(lab: EngineLab) -> Outcome:
    lab.load_mixed([NORM])
    return lab.probe(lab.sample())


def _root_not_sent(lab: EngineLab) -> Outcome:
    return lab.judge_push(lab.push(lab.without_norm()))


def _temperature_one(lab: EngineLab) -> Outcome:
    lab.load_version(VERSION)
    return lab.probe(lab.sample(temperature=1.0))


def _decode_differs(lab: EngineLab) -> Outcome:
    return lab.judge_push(lab.push(lab.trainer, canary=lab.damaged_canary))


ENGINE_CASES: tuple[EngineCase, ...] = (
    EngineCase(
        name="stale weights in the engine",
        made_in="vLLM",
        cause=Cause.STALE_WEIGHTS,
        subject="engine decode",
        points_at=("weights of version 1 instead of 2",),
        run=_stale,
    ),
    EngineCase(
        name="root-level parameter not synced",
        made_in="vLLM, checksums forged",
        cause=Cause.STALE_TENSORS,
        subject="engine decode",
        points_at=(f"root-level tensor {NORM} of version 1 instead of 2",),
        run=_root_stale,
    ),
    EngineCase(
        name="root-level parameter not synced",
        made_in="sender to vLLM",
        cause=Cause.TENSORS_NOT_SENT,
        subject="weight sync",
        points_at=(f"root-level tensors {NORM}, push of version 2",),
        run=_root_not_sent,
    ),
    EngineCase(
        name="temperature not applied",
        made_in="vLLM",
        cause=Cause.TEMPERATURE,
        subject="engine decode",
        points_at=("temperature 0.7 not applied",),
        run=_temperature_one,
    ),
    EngineCase(
        name="decoding with other weights than received",
        made_in="vLLM",
        cause=Cause.DECODE_DIFFERS,
        subject="weight sync",
        points_at=("push of version 2",),
        run=_decode_differs,
    ),
)
