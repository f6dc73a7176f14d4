"""The parity gate on a GPU: trained weights in bfloat16, sampled by a real engine, scored by both trainers.

Honest scorers pass under the recipe's own tolerances; each mistake beside them does not.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from grpo_lib.config import RunConfig, resolve
from grpo_lib.data.chat import load_tokenizer, stop_token_ids
from grpo_lib.data.models import model_cache
from grpo_lib.data.prompts import Split
from grpo_lib.data.store import read_prompts
from grpo_lib.interfaces import InspectableTrainer
from grpo_lib.parity.probe import ENGINE_SCORE, StoredLogprobs, probe
from grpo_lib.parity.report import probe_report
from grpo_lib.pipeline import group_id, sampling_params
from grpo_lib.seeds import sample_seed
from grpo_lib.stages import prepare_data
from grpo_lib.stages.live import live_engines
from grpo_lib.stages.run_paths import RunPaths
from grpo_lib.stages.scorers import ScoredBefore, ScoredBySequence, ScoredByTrainer
from grpo_lib.stages.trainer_rank import build_trainer
from grpo_lib.trainers.varlen_attention import DocumentKernel, document_kernel
from grpo_lib.types import (
    GenerationRequest,
    ParityReport,
    ParityVerdict,
    Prompt,
    Rollout,
    RolloutGroup,
    StateKind,
    StepPlan,
    Verdict,
    VerdictReason,
    VerdictState,
)

MODEL = model_cache() / "smollm2_135m"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not MODEL.is_dir(), reason="needs trained weights: grpo get-model smollm2_135m"),
]

TRAINERS = ("olmo_core", "hf_deepspeed")
OPTIONS = ("data.num_heldout=128", "rollout.group_size=16", "rollout.gpu_memory_share=0.1", "parity.min_tokens=5000")
each_trainer = pytest.mark.parametrize("name", TRAINERS)


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """What the engine drew, and its own scores of it."""

    config: RunConfig
    groups: tuple[RolloutGroup, ...]
    engine_score: ScoredBefore


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Sampled:
    root = tmp_path_factory.mktemp("parity")
    config = resolve("smollm2_addition", [f"model.path={MODEL}", f"storage.root={root}", *OPTIONS])
    paths = RunPaths.of(config, "run")
    prepare_data.run(config, paths)
    prompts = read_prompts(paths.data, Split.HELDOUT)
    stops = stop_token_ids(MODEL, load_tokenizer(MODEL), config.rollout.stop_at)
    with live_engines(config, model_path=MODEL, policy_version=0) as engines:
        asked = list(requests(config, prompts, stops))
        done = {completion.request_id: completion for completion in engines.generate(asked)}
        groups = tuple(as_group(config, prompt, done) for prompt in prompts)
        scores = ScoredBySequence(name=ENGINE_SCORE, scorer=engines).score(groups)
    return Sampled(config=config, groups=groups, engine_score=ScoredBefore(name=ENGINE_SCORE, scores=scores))


def requests(config: RunConfig, prompts: Sequence[Prompt], stops: Sequence[int]) -> Iterator[GenerationRequest]:
    for prompt in prompts:
        for index in range(config.rollout.group_size):
            yield GenerationRequest(
                request_id=f"{group_id(0, prompt)}/{index}",
                prompt_token_ids=prompt.token_ids,
                sampling=sampling_params(config, stops),
                seed=sample_seed(config.seed, 0, prompt.prompt_id, index),
            )


def as_group(config: RunConfig, prompt: Prompt, done: Mapping[str, Any]) -> RolloutGroup:
    name = group_id(0, prompt)
    verdict = Verdict(state=VerdictState.ZERO, reward=0.0, reason=VerdictReason.NO_ANSWER)  # nobody asks for it
    rollouts = tuple(
        Rollout(sample_index=index, completion=done[f"{name}/{index}"], text="", verdict=verdict)
        for index in range(config.rollout.group_size)
    )
    return RolloutGroup(group_id=name, prompt=prompt, rollouts=rollouts)


class OneRank:
    """As much of a `TrainerGroup` as scoring takes, around a trainer in this process."""

    num_ranks = 1

    def __init__(self, backend: InspectableTrainer) -> None:
        self._backend = backend

    def logprobs(self, plan: StepPlan) -> tuple[tuple[torch.Tensor, ...], ...]:
        return (tuple(self._backend.logprobs(batch) for batch in plan.micro_batches[0]),)


def built(config: RunConfig, name: str) -> InspectableTrainer:
    changed = config.model_copy(update={"trainer": config.trainer.model_copy(update={"backend": name})})
    return build_trainer(changed, MODEL, 0, trainable=True)


def scored(sampled: Sampled, name: str, trainer: InspectableTrainer) -> ScoredBefore:
    group: Any = OneRank(trainer)
    scorer = ScoredByTrainer(name=name, trainer=group, config=sampled.config.trainer)
    return ScoredBefore(name=name, scores=scorer.score(sampled.groups))


def report(sampled: Sampled, *scorers: ScoredBefore) -> ParityReport:
    pairs = probe(sampled.groups, [StoredLogprobs(), *scorers], policy_version=0, cap=2.0)
    return probe_report(sampled.config, pairs=pairs, metrics=None, engine_scores=sampled.engine_score in scorers)


@pytest.fixture(autouse=True)
def empty_card() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


def test_engine_and_both_trainers_pass(sampled: Sampled) -> None:
    trainers = [scored(sampled, name, built(sampled.config, name)) for name in TRAINERS]
    found = report(sampled, sampled.engine_score, *trainers)
    assert found.verdict is ParityVerdict.PASS, [check for check in found.checks if check.verdict != "PASS"]
    assert {check.num_observations for check in found.checks if "mean |dlogprob|" in check.name} != {0}


def wrong_temperature(config: RunConfig, name: str) -> InspectableTrainer:
    rollout = config.rollout.model_copy(update={"temperature": 1.05})
    return built(config.model_copy(update={"rollout": rollout}), name)


def layer_without_its_updates(config: RunConfig, name: str) -> InspectableTrainer:
    """A hundred steps of learning rate 1e-5 move a weight by up to 1e-3; here one layer lacks them."""
    trainer = built(config, name)
    state = {key: t.cpu() for bucket in trainer.named_state(StateKind.WEIGHT) for key, t in bucket.tensors}
    generator = torch.Generator().manual_seed(0)

    def read(key: str) -> torch.Tensor:
        moves = key.startswith("model.layers.15.")
        return state[key] + (1e-3 * torch.randn(state[key].shape, generator=generator).sign() if moves else 0)

    trainer.load_state(StateKind.WEIGHT, read)
    return trainer


@each_trainer
@pytest.mark.parametrize("mistake", [wrong_temperature, layer_without_its_updates])
def test_a_mistake_does_not_pass(
    sampled: Sampled, name: str, mistake: Callable[[RunConfig, str], InspectableTrainer]
) -> None:
    found = report(sampled, scored(sampled, name, mistake(sampled.config, name)))
    assert found.verdict is ParityVerdict.FAIL


def leaking_kernel(device: torch.device, dtype: torch.dtype) -> DocumentKernel | None:
    """Takes a row for one document."""
    found = document_kernel(device, dtype)
    assert found is not None

    def attend(q: Any, k: Any, v: Any, cu_lens: torch.Tensor, max_len: int, scale: float | None) -> torch.Tensor:
        return found(q, k, v, cu_lens[[0, -1]], len(q), scale)

    return attend


@each_trainer
def test_documents_that_see_each_other_do_not_pass(
    sampled: Sampled, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start-up probe would refuse such a trainer; here it looks away, and the gate does not."""
    from grpo_lib.trainers import hf_deepspeed, olmo_core, olmo_core_model

    for module in (hf_deepspeed, olmo_core_model):
        monkeypatch.setattr(module, "document_kernel", leaking_kernel)
    for module in (hf_deepspeed, olmo_core):
        monkeypatch.setattr(module, "check_documents_stay_apart", lambda *args, **kwargs: None)
    found = report(sampled, scored(sampled, name, built(sampled.config, name)))
    assert found.verdict is ParityVerdict.FAIL


@each_trainer
def test_a_trainer_differs_from_itself_in_no_bit_however_documents_are_packed(sampled: Sampled, name: str) -> None:
    trainer = built(sampled.config, name)
    packed = scored(sampled, name, trainer).scores
    halves: dict[str, np.ndarray] = {}
    for part in (sampled.groups[::2], sampled.groups[1::2]):
        some = Sampled(config=sampled.config, groups=part, engine_score=sampled.engine_score)
        halves |= scored(some, name, trainer).scores
    alone: dict[str, np.ndarray] = {}
    for group in sampled.groups[:8]:
        one = RolloutGroup(group_id=group.group_id, prompt=group.prompt, rollouts=group.rollouts[:1])
        some = Sampled(config=sampled.config, groups=(one,), engine_score=sampled.engine_score)
        alone |= scored(some, name, trainer).scores
    for other in (halves, alone):
        assert len(other) > 4
        for key, values in other.items():
            np.testing.assert_array_equal(values, packed[key])
