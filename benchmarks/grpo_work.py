"""The same GRPO work for every system: prompts, completion lengths and a reward, the same to the token.

A benchmark's model has random weights and solves nothing, so the reward is a number in [0, 1) drawn from the completion
and its place in the order of verdicts: every group has spread, and every sample is trained on, even where a group's
completions are all the same. Lengths are set per sample and stop tokens are off, so that two systems generate and
train exactly as many tokens.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

from grpo_lib.interfaces import Verifier
from grpo_lib.types import Prompt, Verdict, VerdictReason, VerdictState

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VERIFIER = "draw"
# Under rewards that say nothing, a usual rate turns a random policy into one that repeats itself within a few steps.
# At this one every update is computed and written in full, and the policy stays what it is.
LEARNING_RATE = 1e-9
# Of completions of a small chat model p50 / p5 was 3.4 and p95 / p50 was 4.3: a log-normal of about this width.
_LENGTH_SIGMA = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one step asks for."""

    num_prompts: int = 16
    group_size: int = 8
    prompt_tokens: int = 32
    max_tokens: int = 128
    mixed: bool = False  # lengths spread up to `max_tokens` instead of all equal to it

    @property
    def num_samples(self) -> int:
        return self.num_prompts * self.group_size

    @property
    def lengths(self) -> tuple[int, ...]:
        """Completion tokens of each sample of a step: quantiles of a log-normal that `max_tokens` cuts at its p90.

        The order is scattered, so that long ones lie in every group.
        """
        if not self.mixed:
            return (self.max_tokens,) * self.num_samples
        normal, top = NormalDist(), NormalDist().inv_cdf(0.9)
        drawn = [
            self.max_tokens * math.exp(_LENGTH_SIGMA * (normal.inv_cdf((rank + 0.5) / self.num_samples) - top))
            for rank in range(self.num_samples)
        ]
        lengths = [max(2, min(self.max_tokens, round(length))) for length in drawn]
        scattered = sorted(range(self.num_samples), key=lambda rank: zlib.crc32(b"%d" % rank))
        return tuple(lengths[rank] for rank in scattered)

    @property
    def num_tokens(self) -> int:
        """Prompt and completion tokens of a step."""
        return self.num_samples * self.prompt_tokens + sum(self.lengths)


def prompts_of(tokenizer: PreTrainedTokenizerFast, work: Work, count: int) -> list[Prompt]:
    """Distinct prompts of exactly `work.prompt_tokens` tokens whose text encodes to the same tokens again.

    Raises:
        ValueError: the tokenizer does not give such texts.
    """
    prompts: list[Prompt] = []
    seen: set[str] = set()
    for attempt in range(20 * count):
        words = " ".join(f"{(attempt * 7919 + place * 104_729) % 97}" for place in range(2 * work.prompt_tokens))
        ids = _encode(tokenizer, f"Item {attempt}: {words}")[: work.prompt_tokens]
        text = tokenizer.decode(ids)
        assert isinstance(text, str)
        if text in seen or _encode(tokenizer, text) != ids or len(ids) != work.prompt_tokens:
            continue
        seen.add(text)
        prompts.append(
            Prompt(
                prompt_id=f"work-{len(prompts):05d}",
                text=text,
                token_ids=tuple(ids),
                answer="none",
                dataset="work",
                verifier=VERIFIER,
            )
        )
        if len(prompts) == count:
            return prompts
    raise ValueError(f"{len(prompts)} of {count} prompts of {work.prompt_tokens} tokens keep their tokens as text")


def _encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer(text)["input_ids"])  # pyright: ignore[reportArgumentType] one text gives one list


def spelled(token_ids: Sequence[int]) -> str:
    """Token ids as text: a `TokenDecoder` that loses nothing, where most ids of a random model have no text at all."""
    return " ".join(map(str, token_ids))


def drawn_reward(text: str, place: int) -> float:
    """A number in [0, 1), by the text and the number of verdicts before it."""
    return zlib.crc32(f"{place} {text}".encode()) / 2**32


def build(correct_reward: float) -> Verifier:
    """The draw as a verifier of worker processes."""

    places = itertools.count()

    def verify(prompt: Prompt, text: str) -> Verdict:
        reward = correct_reward * drawn_reward(text, next(places))
        return Verdict(state=VerdictState.VALID, reward=reward, reason=VerdictReason.WRONG)

    return verify
