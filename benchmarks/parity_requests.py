"""What `gpu_parity` has an engine write: chat answers of many lengths, and three-shot sums that go on and on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from grpo_lib.config import RunConfig
    from grpo_lib.types import Completion, GenerationRequest, RolloutGroup

RESPONSE_LIMITS = (64, 128, 256, 512, 768, 1024)
TASKS = (
    "Write a short story about {}.",
    "Explain {} to a child.",
    "List ten facts about {}.",
    "Write a letter to a friend about {}.",
    "Give step-by-step advice about {}.",
    "Argue for and against {}.",
    "Describe the history of {}.",
    "Write a short Python program that has to do with {}.",
)
TOPICS = (
    "a lighthouse", "bread", "the moon", "chess", "rivers", "old maps", "bees", "a railway station", "winter", "glass",
    "mathematics", "a lost dog", "volcanoes", "radio", "gardens", "sailing", "the number zero", "libraries", "salt",
    "a mountain village", "clocks", "friendship", "whales", "paper",
)  # fmt: skip
SUMS_EVERY = 4  # every fourth request is a three-shot sum that goes on to the next question


def requests(config: RunConfig, model: Path, longest: int) -> Iterator[tuple[GenerationRequest, str]]:
    """Endless requests with their prompt's text; the same ones in every run."""
    from grpo_lib.data.chat import PromptEncoder, load_tokenizer, stop_token_ids
    from grpo_lib.data.prompts import addition_rows
    from grpo_lib.seeds import sample_seed
    from grpo_lib.types import GenerationRequest, SamplingParams

    tokenizer = load_tokenizer(model)
    stops = stop_token_ids(model, tokenizer)
    encoders = {kind: PromptEncoder(tokenizer, kind) for kind in ("raw", "tokenizer")}
    sums = [encoders["raw"].encode(row.prompt) for row in addition_rows(config.data)[0]]
    chats = [encoders["tokenizer"].encode(task.format(topic)) for topic in TOPICS for task in TASKS]
    rng = np.random.default_rng(0)
    index = 0
    while True:
        prompts = chats if index % SUMS_EVERY else sums
        prompt = prompts[int(rng.integers(len(prompts)))]
        name = f"sample-{index:06d}"
        sampling = SamplingParams(
            temperature=config.rollout.temperature,
            max_tokens=min(longest, RESPONSE_LIMITS[int(rng.integers(len(RESPONSE_LIMITS)))]),
            stop_token_ids=stops,
        )
        request = GenerationRequest(
            request_id=name,
            prompt_token_ids=prompt.token_ids,
            sampling=sampling,
            seed=sample_seed(config.seed, 0, name, 0),
        )
        yield request, prompt.text
        index += 1


def as_group(request: GenerationRequest, text: str, completion: Completion) -> RolloutGroup:
    """A completion as the store keeps it. Nobody has judged it."""
    from grpo_lib.types import Prompt, Rollout, RolloutGroup, Verdict, VerdictReason, VerdictState

    verdict = Verdict(state=VerdictState.ZERO, reward=0.0, reason=VerdictReason.NO_ANSWER)
    prompt = Prompt(
        prompt_id=request.request_id,
        text=text,
        token_ids=request.prompt_token_ids,
        answer="",
        dataset="parity",
        verifier="exact",
    )
    rollout = Rollout(sample_index=0, completion=completion, text="", verdict=verdict)
    return RolloutGroup(group_id=request.request_id, prompt=prompt, rollouts=(rollout,))
