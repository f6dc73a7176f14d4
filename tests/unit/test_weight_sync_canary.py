"""The decode canary compares what engines decoded, each engine on its own, with the trainer's scores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from grpo_lib.types import Completion, FinishReason, GenerationRequest, SamplingParams, VersionSpan
from grpo_lib.weight_sync.canary import DecodeCanary

PROMPTS = ((1, 2, 3), (4, 5))
SAMPLING = SamplingParams(temperature=1.0, max_tokens=3, stop_token_ids=(0,))


def truth(prompt: tuple[int, ...], response: np.ndarray) -> np.ndarray:
    return -(sum(prompt) + response.astype(np.float32)) / 100


class Engines:
    """Two engines; the second adds `error` to its log-probabilities."""

    def __init__(self, error: float) -> None:
        self.error = error
        self.requests: list[GenerationRequest] = []

    def decode(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        self.requests += requests
        return [[self._complete(request, self.error * engine) for request in reversed(requests)] for engine in range(2)]

    def _complete(self, request: GenerationRequest, error: float) -> Completion:
        tokens = np.arange(3) + request.seed
        return Completion(
            request_id=request.request_id,
            token_ids=tokens,
            logprobs=(truth(request.prompt_token_ids, tokens) + error).astype(np.float32),
            version_spans=(VersionSpan(version=1, start=0, stop=3),),
            finish_reason=FinishReason.LENGTH,
            seed=request.seed,
            latency_s=0.0,
        )


def score(pairs: Sequence[tuple[tuple[int, ...], np.ndarray]]) -> list[np.ndarray]:
    return [truth(prompt, response) for prompt, response in pairs]


def canary(engines: Engines) -> DecodeCanary:
    return DecodeCanary(prompts=PROMPTS, sampling=SAMPLING, decode=engines.decode, score=score, tolerance=1e-4)


def test_agreement_is_ok_and_every_token_counts() -> None:
    engines = Engines(0.0)
    result = canary(engines)(7)
    assert result.ok
    assert result.num_tokens == 2 * 2 * 3
    assert result.max_abs < 1e-7
    assert [r.seed for r in engines.requests] == [0, 1], "fixed seeds: the same samples at every push"
    assert len({r.request_id for r in engines.requests} | {"canary-v7-0", "canary-v7-1"}) == 2


def test_one_bad_engine_of_two_fails() -> None:
    result = canary(Engines(2e-4))(1)
    assert not result.ok
    assert result.max_abs == pytest.approx(2e-4, rel=1e-2)
    assert result.mean_abs == pytest.approx(1e-4, rel=1e-2)


def test_nan_fails() -> None:
    assert not canary(Engines(float("nan")))(1).ok


def test_no_token_is_not_ok() -> None:
    empty = DecodeCanary(prompts=PROMPTS, sampling=SAMPLING, decode=lambda requests: [[]], score=score, tolerance=1e-4)
    assert not empty(1).ok
    with pytest.raises(ValueError, match="at least one prompt"):
        DecodeCanary(prompts=(), sampling=SAMPLING, decode=lambda r: [], score=score, tolerance=1.0)
