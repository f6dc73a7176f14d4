"""Stored steps of the embedded recipe without an engine: real prompts, pipeline, verifier and trainer; Hugging Face's
model samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from grpo_lib import loop
from grpo_lib.config import RunConfig
from grpo_lib.data.chat import load_tokenizer, stop_token_ids, token_decoder
from grpo_lib.data.models import resolve_model_path
from grpo_lib.data.order import PromptStream
from grpo_lib.data.prompts import Split
from grpo_lib.data.store import read_prompts
from grpo_lib.interfaces import ReplayTrainer
from grpo_lib.parity.replay_inputs import ReplayBatch
from grpo_lib.pipeline import RolloutPipeline
from grpo_lib.recipes import embedded_addition
from grpo_lib.stages import prepare_data
from grpo_lib.stages.run_paths import RunPaths
from grpo_lib.storage.rollouts import content_digest
from grpo_lib.timing import StepTimer
from grpo_lib.types import Completion, FinishReason, GenerationRequest, StateKind, VersionSpan
from grpo_lib.verifiers.pool import ProcessVerifierPool

CONFIG: RunConfig = embedded_addition()
MODEL: Path = resolve_model_path(CONFIG.model.path)


@dataclass(kw_only=True)
class HfEngine:
    """`RolloutEngine` as far as the pipeline needs it; one generator per request, prompts of one length together."""

    model: Any
    policy_version: int = 0
    done: list[Completion] = field(default_factory=list)

    def load(self, folder: Path, policy_version: int) -> None:
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, tensor in load_file(folder / f"{StateKind.WEIGHT}.safetensors").items():
                parameters[name].copy_(tensor)
        self.policy_version = policy_version

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        by_length: dict[int, list[GenerationRequest]] = {}
        for request in requests:
            by_length.setdefault(len(request.prompt_token_ids), []).append(request)
        for same in by_length.values():
            self.done += self._generate(same)

    def poll(self, timeout_s: float) -> list[Completion]:
        done, self.done = self.done, []
        return done

    @torch.no_grad()
    def _generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        sampling = requests[0].sampling
        generators = [torch.Generator().manual_seed(request.seed) for request in requests]
        ids = torch.tensor([request.prompt_token_ids for request in requests])
        scores = []
        for _ in range(sampling.max_tokens):
            logits = self.model(input_ids=ids, use_cache=False).logits[:, -1].float() / sampling.temperature
            logprobs = logits.log_softmax(-1)
            drawn = torch.stack(
                [torch.multinomial(row.exp(), 1, generator=g) for row, g in zip(logprobs, generators, strict=True)]
            )
            scores.append(logprobs.gather(1, drawn)[:, 0])
            ids = torch.cat([ids, drawn], dim=1)
        responses, values = ids[:, -sampling.max_tokens :].numpy(), torch.stack(scores, dim=1).numpy()
        return [
            self._completion(request, row, value)
            for request, row, value in zip(requests, responses, values, strict=True)
        ]

    def _completion(self, request: GenerationRequest, ids: np.ndarray, logprobs: np.ndarray) -> Completion:
        stops = np.flatnonzero(np.isin(ids, request.sampling.stop_token_ids))
        length = int(stops[0]) + 1 if len(stops) else len(ids)
        return Completion(
            request_id=request.request_id,
            token_ids=ids[:length].astype(np.int64),
            logprobs=logprobs[:length].astype(np.float32),
            version_spans=(VersionSpan(version=self.policy_version, start=0, stop=length),),
            finish_reason=FinishReason.STOP if len(stops) else FinishReason.LENGTH,
            seed=request.seed,
            latency_s=0.0,
        )


def sampled_steps(trainer: ReplayTrainer, folder: Path, num_steps: int) -> list[ReplayBatch]:
    """The first steps of a run from the base model, which `trainer` takes on the way."""
    from transformers import AutoModelForCausalLM

    paths = RunPaths(run_id="GRPOFlow/1", run=folder / "run", store=str(folder / "store"))
    prepare_data.run(CONFIG, paths)
    tokenizer = load_tokenizer(MODEL)
    engine = HfEngine(model=AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval())
    steps: list[ReplayBatch] = []
    with ProcessVerifierPool(CONFIG.verifier) as verifiers:
        pipeline = RolloutPipeline(
            config=CONFIG,
            engine=engine,  # pyright: ignore[reportArgumentType] the pipeline only submits and polls
            prompts=PromptStream(read_prompts(paths.data, Split.TRAIN), CONFIG.seed),
            verifiers=verifiers,
            decode=token_decoder(tokenizer),
            stop_token_ids=stop_token_ids(MODEL, tokenizer),
        )
        for step in range(1, num_steps + 1):
            drawn = pipeline.next_batch(trainer.policy_version, StepTimer())
            digest = content_digest(drawn.groups, drawn.assessments)
            steps.append(
                ReplayBatch(step=step, groups=drawn.groups, assessments=drawn.assessments, content_digest=digest)
            )
            plan = loop.plan_rollouts(CONFIG, trainer.num_ranks, drawn)
            assert plan is not None, "every step of this recipe has groups with spread"
            loop.forward_backward(CONFIG, trainer, plan)
            trainer.optim_step()
            trainer.dump_state(folder / "weights", [StateKind.WEIGHT])
            engine.load(folder / "weights", trainer.policy_version)
    return steps
