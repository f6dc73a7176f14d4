"""Between our request and completion types and vLLM's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from grpo_lib.rollout.vllm_core import Generated
from grpo_lib.types import Completion, FinishReason, GenerationRequest, SamplingParams, VersionSpan

if TYPE_CHECKING:
    import vllm

_MIN_TEMPERATURE = 0.01  # vLLM clamps smaller ones to this, and treats those near 0 as greedy


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What this engine can serve."""

    max_model_len: int  # prompt and response tokens together
    max_scored_len: int  # likewise, of a sequence to score
    vocab_size: int
    temperature: float  # of the run; other temperatures are possible only for sampling

    def check(self, request: GenerationRequest) -> None:
        """Raise `ValueError` for a request that vLLM would refuse, clamp or reinterpret."""
        sampling, name = request.sampling, f"request {request.request_id!r}"
        self.check_tokens(name, request.prompt_token_ids)
        total = len(request.prompt_token_ids) + sampling.max_tokens
        if sampling.max_tokens < 1 or total > self.max_model_len:
            raise ValueError(
                f"{name}: {len(request.prompt_token_ids)} prompt tokens + max_tokens {sampling.max_tokens} must lie "
                f"within the engine's {self.max_model_len}; shorten the prompt or lower rollout.max_tokens"
            )
        if sampling.temperature < _MIN_TEMPERATURE:
            raise ValueError(
                f"{name}: temperature {sampling.temperature} is below {_MIN_TEMPERATURE}; use greedy=True for argmax"
            )
        if sampling.greedy and sampling.temperature not in (1.0, self.temperature):
            raise ValueError(
                f"{name}: greedy log-probabilities are available at temperature 1 and at the run's "
                f"{self.temperature}, not at {sampling.temperature}"
            )
        if not 0 <= request.seed < 2**63:
            raise ValueError(f"{name}: seed {request.seed} is not in [0, 2^63)")

    def check_tokens(self, name: str, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise ValueError(f"{name} has no tokens")
        if min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            raise ValueError(
                f"{name}: token ids from {min(token_ids)} to {max(token_ids)} do not fit a vocabulary of "
                f"{self.vocab_size}; the tokenizer and the model differ"
            )


@dataclass(slots=True, kw_only=True)
class InFlight:
    """A request inside the engine; `marks` grows when the weights change under it."""

    request: GenerationRequest
    submitted_at: float = field(default_factory=time.perf_counter)
    marks: list[tuple[int, int]] = field(default_factory=list)  # (policy version, first token that is not its own)

    def completion(self, generated: Generated, reason: FinishReason, version: int) -> Completion:
        num_tokens = len(generated.token_ids)
        if len(generated.logprobs) != num_tokens:
            raise RuntimeError(f"vLLM returned {len(generated.logprobs)} log-probabilities for {num_tokens} tokens")
        return Completion(
            request_id=self.request.request_id,
            token_ids=np.asarray(generated.token_ids, dtype=np.int64),
            logprobs=np.asarray(generated.logprobs, dtype=np.float32),
            version_spans=version_spans([*self.marks, (version, num_tokens)]),
            finish_reason=reason,
            seed=self.request.seed,
            latency_s=time.perf_counter() - self.submitted_at,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlightScore:
    """A sequence being scored; `future` receives its [R] float32 log-probabilities."""

    num_tokens: int
    num_prompt_tokens: int
    future: Future[np.ndarray]

    def response_part(self, logprobs: np.ndarray | None) -> np.ndarray:
        """Of all tokens but the first → of the response's."""
        returned = 0 if logprobs is None else len(logprobs)
        if logprobs is None or returned != self.num_tokens - 1:
            raise RuntimeError(f"vLLM returned {returned} log-probabilities for {self.num_tokens - 1} scored tokens")
        return logprobs[self.num_prompt_tokens - 1 :].astype(np.float32)


def version_spans(marks: Sequence[tuple[int, int]]) -> tuple[VersionSpan, ...]:
    """Spans from (version, end) marks in order: ``[(3, 2), (4, 2), (5, 6)]`` → 3: [0, 2), 5: [2, 6)."""
    spans: list[VersionSpan] = []
    start = 0
    for version, stop in marks:
        if stop == start:
            continue
        if spans and spans[-1].version == version:
            start = spans.pop().start
        spans.append(VersionSpan(version=version, start=start, stop=stop))
        start = stop
    return tuple(spans)


def sampling_params(sampling: SamplingParams, seed: int) -> vllm.SamplingParams:
    """vLLM's parameters for one request: nothing but the given stop tokens ends it early."""
    import vllm
    from vllm.sampling_params import RequestOutputKind

    extra = None
    if sampling.greedy and sampling.temperature != 1.0:
        from grpo_lib.rollout.greedy_temperature import EXTRA_ARG

        extra = {EXTRA_ARG: sampling.temperature}
    return vllm.SamplingParams(
        temperature=0.0 if sampling.greedy else sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=seed,
        max_tokens=sampling.max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,
        logprobs=0,  # of the sampled token only
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args=extra,
        skip_clone=True,  # built for one request
    )


def scoring_params() -> vllm.SamplingParams:
    """Log-probabilities of the prompt's own tokens; vLLM insists on sampling one more, which is dropped."""
    import vllm
    from vllm.sampling_params import RequestOutputKind

    return vllm.SamplingParams(
        temperature=1.0,
        max_tokens=1,
        prompt_logprobs=0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def finish_reason(reason: str | None) -> FinishReason:
    """vLLM's reason as ours; an unknown one is an error, not a guess."""
    try:
        return FinishReason(reason or "")
    except ValueError:
        raise RuntimeError(f"vLLM ended a request with the unknown reason {reason!r}") from None
