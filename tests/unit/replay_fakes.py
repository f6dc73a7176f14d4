"""A replay trainer in a page of plain PyTorch, with its files, and stored steps for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from grpo_lib.algo.advantages import assess_group
from grpo_lib.algo.losses import build_loss
from grpo_lib.algo.objective import micro_batch_objective
from grpo_lib.config import RunConfig
from grpo_lib.parity.replay_inputs import ReplayBatch
from grpo_lib.seeds import sample_seed
from grpo_lib.types import (
    TRAINING_STATE,
    Completion,
    FinishReason,
    PackedBatch,
    Prompt,
    Rollout,
    RolloutGroup,
    Stat,
    StateKind,
    StepMetrics,
    StepPlan,
    VersionSpan,
)
from tests.unit.fakes import small_config, valid

VOCAB, WIDTH = 32, 8
NUM_STEPS = 4


def replay_config(**sections: dict[str, object]) -> RunConfig:
    """Two groups of four a step, in packs of a few documents; every step counts as enough."""
    base: dict[str, dict[str, object]] = {
        "trainer": {"num_ranks": 1, "pack_length": 16, "micro_batch_packs": 8, "learning_rate": 1e-2},
        "parity": {"replay_steps": NUM_STEPS},
        "loop": {"steps": 10},
    }
    return small_config(**{name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}})


def stored_steps(config: RunConfig, num_steps: int = NUM_STEPS, *, empty: Sequence[int] = ()) -> list[ReplayBatch]:
    """Steps 1 … `num_steps` as a run would have stored them; those in `empty` have no spread in their rewards."""
    steps, version = [], 0
    for step in range(1, num_steps + 1):
        groups = tuple(_group(config, step, number, version, flat=step in empty) for number in range(2))
        assessments = tuple(
            assess_group(group, kind=config.algorithm.advantage, correct_reward=config.verifier.correct_reward)
            for group in groups
        )
        steps.append(ReplayBatch(step=step, groups=groups, assessments=assessments, content_digest=f"table {step}"))
        version += step not in empty
    return steps


def _group(config: RunConfig, step: int, number: int, version: int, *, flat: bool) -> RolloutGroup:
    rng = np.random.default_rng([step, number])
    prompt = Prompt(
        prompt_id=f"p{step}-{number}", text="x", token_ids=(2, 3), answer="x", dataset="d", verifier="integer"
    )
    rollouts = []
    for index in range(config.rollout.group_size):
        length = int(rng.integers(2, 5))
        completion = Completion(
            request_id=f"e0.{prompt.prompt_id}/{index}",
            token_ids=rng.integers(4, VOCAB, length),
            logprobs=rng.normal(-3.4, 0.2, length).astype(np.float32),
            version_spans=(VersionSpan(version=version, start=0, stop=length),),
            finish_reason=FinishReason.STOP,
            seed=sample_seed(config.seed, 0, prompt.prompt_id, index),
            latency_s=0.0,
        )
        reward = 1.0 if flat or index == 0 else float(rng.integers(0, 2)) * (index != 1)
        rollouts.append(Rollout(sample_index=index, completion=completion, text="x", verdict=valid(reward)))
    return RolloutGroup(group_id=f"e0.{prompt.prompt_id}", prompt=prompt, rollouts=tuple(rollouts))


Fault = Callable[["PlainTrainer"], None]


@dataclass(eq=False)
class PlainTrainer:
    """`ReplayTrainer`: next-token logits are one embedding times one matrix.

    Faults run at one version, once: after the gradient, or after the optimiser step.
    """

    config: RunConfig
    name: str = "plain"
    num_ranks: int = 1
    has_reference: bool = False
    after_gradient: dict[int, Fault] = field(default_factory=dict)  # by the version before the step
    after_step: dict[int, Fault] = field(default_factory=dict)
    logprob_offset: dict[int, float] = field(default_factory=dict)
    learning_rate: float | None = None  # in place of the configured one
    policy_version: int = 0
    journal: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weights = {
            name: torch.randn(shape, generator=generator, dtype=torch.float32).mul_(0.3).requires_grad_()
            for name, shape in (("embedding", (VOCAB, WIDTH)), ("head", (WIDTH, VOCAB)))
        }
        self._loss = build_loss(self.config.algorithm)
        self._rebuild({name: torch.zeros(2, *weight.shape) for name, weight in self.weights.items()})

    def logprobs(self, plan: StepPlan, *, reference: bool = False) -> tuple[tuple[torch.Tensor, ...], ...]:
        self.journal.append("logprobs")
        offset = self.logprob_offset.get(self.policy_version, 0.0)
        with torch.no_grad():
            return tuple(tuple(self._forward(batch)[0] + offset for batch in rank) for rank in plan.micro_batches)

    def forward_backward(self, plan: StepPlan, *, loss_denominator: float) -> StepMetrics:
        self.journal.append("forward_backward")
        parts = []
        for batch in (batch for rank in plan.micro_batches for batch in rank):
            logprobs, entropy = self._forward(batch)
            cap = self.config.algorithm.correction_cap
            loss, metrics = micro_batch_objective(
                logprobs, entropy, batch, self._loss, loss_denominator=loss_denominator, correction_cap=cap
            )
            loss.backward()
            parts.append(metrics)
        self.after_gradient.get(self.policy_version, lambda _: None)(self)
        return StepMetrics.merged(parts)

    def optim_step(self) -> StepMetrics:
        self.journal.append("optim_step")
        version, before = self.policy_version, {name: w.detach().clone() for name, w in self.weights.items()}
        norm = float(torch.nn.utils.get_total_norm([self.gradient(name) for name in self.weights]))
        self.adamw.step()
        self.adamw.zero_grad()
        self.policy_version += 1
        self.after_step.get(version, lambda _: None)(self)
        moved = any(not torch.equal(before[name], w) for name, w in self.weights.items())
        rate = self.adamw.param_groups[0]["lr"]
        return StepMetrics(
            stats={
                "optim/grad_norm": Stat.mean(norm, 1),
                "optim/lr": Stat.mean(rate, 1),
                "optim/weights_moved": Stat.min(float(moved)),
            }
        )

    def dump_state(self, folder: Path, kinds: Sequence[StateKind]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "state.json").write_text(json.dumps({"policy_version": self.policy_version}))
        for kind in kinds:
            save_file({name: self._read(kind, name).clone() for name in self.weights}, folder / f"{kind}.safetensors")

    def restore_state(self, folder: Path) -> None:
        weight, first, second = (load_file(folder / f"{kind}.safetensors") for kind in TRAINING_STATE)
        self.policy_version = json.loads((folder / "state.json").read_text())["policy_version"]
        with torch.no_grad():
            for name, tensor in self.weights.items():
                tensor.copy_(weight[name])
        self._rebuild({name: torch.stack([first[name], second[name]]) for name in self.weights})

    def gradient(self, name: str) -> torch.Tensor:
        grad = self.weights[name].grad
        assert grad is not None, "gradients exist between forward_backward and optim_step"
        return grad

    def hidden_states(self, plan: StepPlan) -> tuple[tuple[dict[str, torch.Tensor], ...], ...]:
        raise NotImplementedError

    def begin_save(self, path: Path) -> None:
        raise NotImplementedError

    def written(self, *, wait: bool, deadline_s: float | None = None) -> None:
        raise NotImplementedError

    def load(self, path: Path) -> None:
        raise NotImplementedError

    def export_hf(self, path: Path) -> None:
        raise NotImplementedError

    def _forward(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.weights["embedding"][batch.input_ids] @ self.weights["head"]
        logprobs = logits.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1).detach()
        return logprobs.gather(-1, batch.labels[..., None])[..., 0], entropy

    def _read(self, kind: StateKind, name: str) -> torch.Tensor:
        weight = self.weights[name]
        if kind is StateKind.WEIGHT:
            return weight.detach()
        return self.gradient(name) if kind is StateKind.GRADIENT else self.adamw.state[weight][str(kind)]

    def _rebuild(self, moments: dict[str, torch.Tensor]) -> None:
        trainer = self.config.trainer
        self.adamw = torch.optim.AdamW(
            self.weights.values(),
            lr=self.learning_rate or trainer.learning_rate,
            betas=(trainer.adam_beta1, trainer.adam_beta2),
            eps=1e-5,
            weight_decay=0.0,
        )
        for name, weight in self.weights.items():
            weight.grad = None
            first, second = moments[name]
            step = torch.tensor(float(self.policy_version))
            self.adamw.state[weight] = {"step": step, "exp_avg": first.clone(), "exp_avg_sq": second.clone()}


class StateFiles:
    """`TensorReader` of what `PlainTrainer` dumped."""

    def __init__(self, folder: Path, kind: StateKind) -> None:
        self._tensors = load_file(folder / f"{kind}.safetensors")
        self.names = tuple(self._tensors)

    def __call__(self, name: str) -> torch.Tensor:
        return self._tensors[name]
