"""Stored steps of a small run: a tiny model samples, rewards are arithmetic, and a real trainer takes the steps.

The sampler is Hugging Face's model, drawing with one generator per sample, so that a run needs no engine and a second
with another seed costs a second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from grpo_lib import loop
from grpo_lib.algo.advantages import assess_group
from grpo_lib.config import RunConfig, with_overrides
from grpo_lib.parity.replay_inputs import ReplayBatch
from grpo_lib.recipes import embedded_addition
from grpo_lib.seeds import sample_seed
from grpo_lib.storage.rollouts import content_digest
from grpo_lib.types import (
    TRAINING_STATE,
    Completion,
    FinishReason,
    Prompt,
    Rollout,
    RolloutGroup,
    Verdict,
    VerdictReason,
    VerdictState,
    VersionSpan,
)
from tests.parity.local_trainers import LocalTrainer, build_backend
from tests.tiny_models import VOCAB

NUM_STEPS = 3
TEMPERATURE = 0.7
STOP = 2
# AdamW's first step is g / (|g| + epsilon): at the recipe's 1e-8 a weight whose gradient is nothing but rounding moves
# by a whole learning rate, in a direction that no two right trainers agree on. One such weight of these 31 thousand is
# 1e-5 of their norm, the tolerance of lockstep, and one of 31 set-ups had one.
_OVERRIDES = (
    "trainer.adam_eps=1e-6",
    f"rollout.temperature={TEMPERATURE}",
    "rollout.group_size=8",
    "rollout.max_tokens=8",
    "loop.prompts_per_step=16",
    "loop.steps=10",
    "trainer.num_ranks=1",
    "trainer.pack_length=64",
    "trainer.micro_batch_packs=8",
    "parity.min_tokens=500",
    f"parity.replay_steps={NUM_STEPS}",
)


def run_config(seed: int = 1) -> RunConfig:
    return with_overrides(embedded_addition(), [*_OVERRIDES, f"seed={seed}"])


@dataclass(frozen=True, kw_only=True)
class StoredSteps:
    """What a run leaves behind that replay, probe and bisect read."""

    config: RunConfig
    model: Path
    batches: tuple[ReplayBatch, ...]
    versions: tuple[Path, ...]  # folders of the training state, by version
    metrics: tuple[dict[str, float], ...]  # of each step, those that the checks of a run's record read

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        return load_file(self.versions[version] / "weight.safetensors")

    def readers(self) -> dict[int, Callable[[str], torch.Tensor]]:
        return {version: self.weights(version).__getitem__ for version in range(len(self.versions))}

    def advantages(self, step: int) -> dict[str, float]:
        """Sample id → advantage in a step (1-based)."""
        batch = self.batches[step - 1]
        return {
            group.sample_id(index): float(value)
            for group, assessment in zip(batch.groups, batch.assessments, strict=True)
            for index, value in enumerate(assessment.advantages)
        }


def store_steps(model: Path, folder: Path, *, seed: int = 1, num_steps: int = NUM_STEPS) -> StoredSteps:
    """Sample, judge and train `num_steps` steps with the OLMo-core trainer; every seed gets the same prompts."""
    config = run_config(seed)
    trainer = LocalTrainer(build_backend("olmo_core", config, model), config, name="olmo_core")
    sampler = Sampler(model)
    batches, versions, metrics = [], [], []
    for step in range(1, num_steps + 1):
        versions.append(folder / f"v{step - 1}")
        trainer.dump_state(versions[-1], TRAINING_STATE)
        sampler.load(load_file(versions[-1] / "weight.safetensors"))
        batch = draw_step(sampler, config, step, version=step - 1)
        batches.append(batch)
        plan = loop.plan_rollouts(config, 1, batch.rollouts)
        assert plan is not None
        trained = loop.forward_backward(config, trainer, plan).values()
        row = {"step": step, "optim/applied": 1.0, "batch/trained_tokens": plan.num_trained_tokens}
        metrics.append({**row, **trained, **trainer.optim_step().values(), "policy_version": trainer.policy_version})
    versions.append(folder / f"v{num_steps}")
    trainer.dump_state(versions[-1], TRAINING_STATE)
    return StoredSteps(
        config=config, model=model, batches=tuple(batches), versions=tuple(versions), metrics=tuple(metrics)
    )


class Sampler:
    """Hugging Face's model as an engine: ids, log-probabilities at the temperature, one generator per sample."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        parameters = dict(self._model.named_parameters())
        with torch.no_grad():
            for name, tensor in weights.items():
                parameters[name].copy_(tensor)

    @torch.no_grad()
    def draw(self, prompt: Sequence[int], seeds: Sequence[int], max_tokens: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """(token ids, log-probabilities) per seed; all members of a group in one batch."""
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        ids = torch.tensor([list(prompt)] * len(seeds))
        logprobs = []
        for _ in range(max_tokens):
            log_softmax = (self._model(ids, use_cache=False).logits[:, -1].float() / TEMPERATURE).log_softmax(-1)
            drawn = torch.stack(
                [torch.multinomial(row.exp(), 1, generator=g) for row, g in zip(log_softmax, generators, strict=True)]
            )
            logprobs.append(log_softmax.gather(1, drawn)[:, 0])
            ids = torch.cat([ids, drawn], dim=1)
        drawn_ids, values = ids[:, len(prompt) :].numpy(), torch.stack(logprobs, dim=1).numpy()
        lengths = [int(np.argmax(row == STOP)) + 1 if (row == STOP).any() else max_tokens for row in drawn_ids]
        return [
            (row[:n].copy(), value[:n].astype(np.float32))
            for row, value, n in zip(drawn_ids, values, lengths, strict=True)
        ]


def draw_step(sampler: Sampler, config: RunConfig, step: int, *, version: int) -> ReplayBatch:
    """One step's groups by the weights that the sampler holds, labelled with `version`."""
    groups = []
    for number in range(config.loop.prompts_per_step):
        prompt_id = f"p{step}-{number}"
        rng = np.random.default_rng([step, number])
        prompt = tuple(rng.integers(3, VOCAB, int(rng.integers(3, 9))).tolist())
        seeds = [sample_seed(config.seed, 0, prompt_id, index) for index in range(config.rollout.group_size)]
        drawn = sampler.draw(prompt, seeds, config.rollout.max_tokens)
        groups.append(_group(prompt_id, prompt, drawn, seeds, version, config.rollout.max_tokens))
    return stored(step, groups, config)


def stored(step: int, groups: Sequence[RolloutGroup], config: RunConfig) -> ReplayBatch:
    """The step as the run's store gives it back."""
    kind, correct = config.algorithm.advantage, config.verifier.correct_reward
    assessments = tuple(assess_group(group, kind=kind, correct_reward=correct) for group in groups)
    return ReplayBatch(
        step=step,
        groups=tuple(groups),
        assessments=assessments,
        content_digest=content_digest(groups, assessments),
    )


def _group(
    prompt_id: str,
    prompt: tuple[int, ...],
    drawn: Sequence[tuple[np.ndarray, np.ndarray]],
    seeds: Sequence[int],
    version: int,
    max_tokens: int,
) -> RolloutGroup:
    rollouts = tuple(
        Rollout(
            sample_index=index,
            completion=Completion(
                request_id=f"{prompt_id}/{index}",
                token_ids=ids.astype(np.int64),
                logprobs=logprobs,
                version_spans=(VersionSpan(version=version, start=0, stop=len(ids)),),
                finish_reason=FinishReason.STOP if ids[-1] == STOP else FinishReason.LENGTH,
                seed=seed,
                latency_s=0.0,
            ),
            text="",
            verdict=Verdict(
                state=VerdictState.VALID,
                reward=float(ids.sum() % 3 == 0),
                reason=VerdictReason.CORRECT if ids.sum() % 3 == 0 else VerdictReason.WRONG,
            ),
        )
        for index, ((ids, logprobs), seed) in enumerate(zip(drawn, seeds, strict=True))
    )
    return RolloutGroup(
        group_id=f"e0.{prompt_id}",
        prompt=Prompt(prompt_id=prompt_id, text="", token_ids=prompt, answer="", dataset="sums", verifier="exact"),
        rollouts=rollouts,
    )
