"""Small hand-written parts for loop tests: they keep a journal and misbehave on request."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from grpo_lib.algo.advantages import GroupAssessment
from grpo_lib.config import RunConfig
from grpo_lib.loop import StepRecord
from grpo_lib.recipes import RECIPES
from grpo_lib.types import (
    CanaryResult,
    Completion,
    FinishReason,
    GenerationRequest,
    Prompt,
    RolloutGroup,
    Stat,
    StepMetrics,
    StepPlan,
    SyncCertificate,
    Verdict,
    VerdictReason,
    VerdictState,
    VersionSpan,
    WrittenFile,
)

STOP = 1


def small_config(**sections: dict[str, object]) -> RunConfig:
    """The embedded recipe with a small step; keyword arguments override fields by section."""
    config = RECIPES["embedded_addition"]()
    base = {
        "rollout": {"group_size": 4, "max_tokens": 4},
        "loop": {"steps": 3, "prompts_per_step": 2, "checkpoint_every": 2, "max_empty_steps": 3},
        "deadlines": {"generate_s": 5.0},
        "trainer": {"pack_length": 32, "num_ranks": 2},
    }
    data = config.model_dump()
    for section, values in [*base.items(), *sections.items()]:
        data[section].update(values)
    return RunConfig.model_validate(data)


def prompt(number: int) -> Prompt:
    return Prompt(
        prompt_id=f"sums-train-{number:06d}",
        text=f"{number}+0=",
        token_ids=(2, 10 + number, 3),
        answer=str(number),
        dataset="sums",
        verifier="integer",
    )


@dataclass
class FakePrompts:
    """Prompts 0, 1, 2, … of epoch 0."""

    position: int = 0

    def take(self, count: int) -> list[tuple[int, Prompt]]:
        drawn = [(0, prompt(self.position + i)) for i in range(count)]
        self.position += count
        return drawn

    def state(self) -> dict[str, int]:
        return {"position": self.position}


@dataclass
class FakeEngine:
    """Answers every request; the last token before STOP says whether the verifier will like it."""

    journal: list[str]
    version: int = -1  # nothing was pushed yet
    token_version: Callable[[int], int] = lambda version: version
    finish: FinishReason = FinishReason.STOP
    queue: list[GenerationRequest] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)

    @property
    def policy_version(self) -> int:
        return self.version

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self.journal.append(f"submit {len(requests)} at v{self.version}")
        self.queue += requests
        self.seeds += [request.seed for request in requests]

    def poll(self, timeout_s: float) -> list[Completion]:
        done, self.queue = self.queue[:3], self.queue[3:]  # a few at a time, as a real engine would
        return [
            Completion(
                request_id=request.request_id,
                token_ids=np.array([20 + int(request.request_id.split("/")[1]), STOP], np.int64),
                logprobs=np.array([-0.5, -0.25], np.float32),
                version_spans=(VersionSpan(version=self.token_version(self.version), start=0, stop=2),),
                finish_reason=self.finish,
                seed=request.seed,
                latency_s=0.01,
            )
            for request in done
        ]

    def score(self, sequences: Sequence[tuple[Sequence[int], int]]) -> list[np.ndarray]:
        raise NotImplementedError

    def load_weights(self, path: Path, policy_version: int) -> None:
        raise NotImplementedError

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class FakeVerifiers:
    """Judges by a function of (prompt, text)."""

    judge: Callable[[Prompt, str], Verdict]
    done: dict[str, Verdict] = field(default_factory=dict)

    def submit(self, key: str, prompt: Prompt, text: str) -> None:
        self.done[key] = self.judge(prompt, text)

    def collect(self, timeout_s: float) -> dict[str, Verdict]:
        done, self.done = self.done, {}
        return done

    def close(self) -> None: ...


def valid(reward: float) -> Verdict:
    return Verdict(
        state=VerdictState.VALID, reward=reward, reason=VerdictReason.CORRECT if reward else VerdictReason.WRONG
    )


def mixed(_: Prompt, text: str) -> Verdict:
    """Half of each group is right: members 0 and 2."""
    return valid(float(int(text.split()[0]) % 2 == 0))


def hopeless(_: Prompt, text: str) -> Verdict:
    return valid(0.0)


@dataclass
class FakeTrainer:
    """Counts what it is asked to do; `version` moves with optimiser steps only."""

    journal: list[str]
    version: int = 0
    num_ranks: int = 2
    has_reference: bool = False
    masked_share: float = 0.0
    plans: list[StepPlan] = field(default_factory=list)
    denominators: list[float] = field(default_factory=list)
    saving: tuple[Path, str] = (Path(), "")
    is_written: bool = True  # whether a save is over when nobody waits for it
    failure: Exception | None = None  # of a save

    @property
    def policy_version(self) -> int:
        return self.version

    def forward_backward(self, plan: StepPlan, *, loss_denominator: float) -> StepMetrics:
        self.journal.append("forward_backward")
        self.plans.append(plan)
        self.denominators.append(loss_denominator)
        tokens = plan.num_trained_tokens
        return StepMetrics(
            stats={
                "loss/policy": Stat.mean(0.0, tokens),
                "correction/masked_share": Stat.mean(self.masked_share * tokens, tokens),
            }
        )

    def optim_step(self) -> StepMetrics:
        self.journal.append("optim_step")
        self.version += 1
        return StepMetrics(stats={"optim/weights_moved": Stat.mean(1.0, 1.0)})

    def logprobs(self, plan: StepPlan, *, reference: bool = False):
        self.journal.append("reference" if reference else "logprobs")
        return tuple(tuple(batch.rollout_logprobs - 0.5 for batch in rank) for rank in plan.micro_batches)

    def begin_save(self, path: Path) -> None:
        """What a test looks for in a checkpoint: the version at this moment."""
        self.journal.append(f"save v{self.version}")
        self.saving = (path, f"version {self.version}")

    def written(self, *, wait: bool, deadline_s: float | None = None) -> tuple[WrittenFile, ...] | None:
        if self.failure is not None:
            raise self.failure
        if not (wait or self.is_written):
            return None
        path, content = self.saving
        (path / "state").write_text(content)
        digest = hashlib.sha256(content.encode()).hexdigest()
        return (WrittenFile(name="state", size_bytes=len(content), sha256=digest),)

    def load(self, path: Path) -> None: ...

    def export_hf(self, path: Path) -> None: ...


@dataclass
class FakeSync:
    """Hands the version to the engine; `broken` makes it hand out certificates that are not ok."""

    journal: list[str]
    engine: FakeEngine
    broken: bool = False

    def connect(self) -> None: ...

    def release(self) -> None:
        self.journal.append("release")

    def push(self, policy_version: int) -> SyncCertificate:
        self.journal.append(f"push v{policy_version}")
        self.engine.version = policy_version
        return SyncCertificate(
            policy_version=policy_version,
            engine_versions=(policy_version,),
            num_tensors=1,
            num_bytes=4,
            transfer_s=0.001,
            missing=("model.norm.weight",) if self.broken else (),
            unexpected=(),
            unloaded=(),
            mismatched=(),
            checksum="00",
            canary=CanaryResult(num_tokens=4, max_abs=0.0, mean_abs=0.0, tolerance=1e-5, seconds=0.0),
        )


@dataclass
class FakeRecorder:
    journal: list[str]
    certificates: list[SyncCertificate] = field(default_factory=list)
    groups: list[tuple[RolloutGroup, ...]] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    checkpoints: list[tuple[int, dict[str, int], int]] = field(default_factory=list)

    def certificate(self, certificate: SyncCertificate) -> None:
        self.certificates.append(certificate)

    def rollouts(self, step: int, groups: tuple[RolloutGroup, ...], assessments: tuple[GroupAssessment, ...]) -> None:
        self.journal.append(f"store rollouts {step}")
        self.groups.append(groups)

    def flush(self) -> None:
        self.journal.append("flush")

    def checkpoint(self, step: int, prompt_state: dict[str, int], empty_steps: int) -> None:
        self.journal.append(f"checkpoint {step}")
        self.checkpoints.append((step, prompt_state, empty_steps))

    def step(self, record: StepRecord) -> None:
        self.records.append(record)
