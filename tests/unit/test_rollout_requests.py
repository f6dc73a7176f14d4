"""Requests that vLLM would clamp or reinterpret are refused; spans and completions come out as promised."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from grpo_lib.rollout.vllm_core import Generated
from grpo_lib.rollout.vllm_requests import InFlight, InFlightScore, RequestLimits, finish_reason, version_spans
from grpo_lib.types import FinishReason, GenerationRequest, SamplingParams, VersionSpan

LIMITS = RequestLimits(max_model_len=16, max_scored_len=16, vocab_size=50, temperature=0.7)
SAMPLING = SamplingParams(temperature=0.7, max_tokens=8, stop_token_ids=(1,))
REQUEST = GenerationRequest(request_id="e0.p/3", prompt_token_ids=(4, 5, 6), sampling=SAMPLING, seed=3)


def span(version: int, start: int, stop: int) -> VersionSpan:
    return VersionSpan(version=version, start=start, stop=stop)


@pytest.mark.parametrize(
    ("request_changes", "sampling_changes", "message"),
    [
        ({"prompt_token_ids": tuple(range(2, 11))}, {}, r"9 prompt tokens \+ max_tokens 8 .* engine's 16"),
        ({}, {"max_tokens": 0}, "max_tokens 0"),
        ({"prompt_token_ids": ()}, {}, "has no tokens"),
        ({"prompt_token_ids": (4, 50)}, {}, "token ids from 4 to 50 do not fit a vocabulary of 50"),
        ({"prompt_token_ids": (-1, 4)}, {}, "token ids from -1 to 4"),
        ({}, {"temperature": 0.0}, r"temperature 0.0 is below 0.01; use greedy=True"),
        ({}, {"temperature": 0.005}, "temperature 0.005 is below"),
        ({}, {"greedy": True, "temperature": 0.9}, r"at temperature 1 and at the run's 0.7, not at 0.9"),
        ({"seed": -1}, {}, "seed -1"),
        ({"seed": 2**63}, {}, "seed"),
    ],
)
def test_refused_requests(request_changes: dict, sampling_changes: dict, message: str) -> None:
    request = replace(REQUEST, sampling=replace(SAMPLING, **sampling_changes), **request_changes)
    with pytest.raises(ValueError, match=message) as caught:
        LIMITS.check(request)
    assert "e0.p/3" in str(caught.value)


@pytest.mark.parametrize(
    "changes", [{}, {"greedy": True}, {"greedy": True, "temperature": 1.0}, {"max_tokens": 13}, {"temperature": 2.0}]
)
def test_accepted_requests(changes: dict) -> None:
    LIMITS.check(replace(REQUEST, sampling=replace(SAMPLING, **changes)))


@pytest.mark.parametrize(
    ("marks", "spans"),
    [
        ([(3, 6)], (span(3, 0, 6),)),
        ([(3, 2), (4, 6)], (span(3, 0, 2), span(4, 2, 6))),
        ([(3, 2), (4, 2), (5, 6)], (span(3, 0, 2), span(5, 2, 6))),  # no token was sampled by 4
        ([(3, 0), (4, 6)], (span(4, 0, 6),)),  # still waiting when the weights changed
        ([(3, 6), (4, 6)], (span(3, 0, 6),)),
        ([(3, 2), (3, 6)], (span(3, 0, 6),)),  # the same version pushed again
        ([(3, 0)], ()),
    ],
)
def test_version_spans(marks: list[tuple[int, int]], spans: tuple[VersionSpan, ...]) -> None:
    assert version_spans(marks) == spans


def test_completion_keeps_ids_logprobs_and_versions() -> None:
    flight = InFlight(request=REQUEST)
    flight.marks.append((6, 1))
    generated = Generated(key="e0.p/3", token_ids=[7, 8, 1], logprobs=[-0.5, -1.5, -2.5])
    completion = flight.completion(generated, FinishReason.STOP, 7)
    assert completion.token_ids.tolist() == [7, 8, 1]
    assert completion.logprobs.tolist() == [-0.5, -1.5, -2.5]
    assert completion.version_spans == (span(6, 0, 1), span(7, 1, 3))
    assert (completion.request_id, completion.seed) == ("e0.p/3", 3)
    empty = InFlight(request=REQUEST).completion(Generated(key="e0.p/3"), FinishReason.ABORT, 7)
    assert (empty.version_spans, empty.logprobs.dtype) == ((), np.float32)


def test_reasons_are_mapped_exactly_and_unknown_ones_raise() -> None:
    assert [finish_reason(r) for r in ("stop", "length", "abort")] == list(FinishReason)
    for unknown in ("error", "repetition", None):
        with pytest.raises(RuntimeError, match="unknown reason"):
            finish_reason(unknown)


def test_missing_logprobs_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="1 log-probabilities for 2 tokens"):
        InFlight(request=REQUEST).completion(
            Generated(key="e0.p/3", token_ids=[7, 8], logprobs=[-0.5]), FinishReason.STOP, 7
        )


def test_a_score_is_the_part_of_the_response() -> None:
    score = InFlightScore(num_tokens=5, num_prompt_tokens=3, future=Future())
    scored = np.array([-1, -2, -3, -4], np.float32)  # of tokens 1 to 4
    assert score.response_part(scored).tolist() == [-3, -4]
    for wrong in (scored[:3], None):
        with pytest.raises(RuntimeError, match="for 4 scored tokens"):
            score.response_part(wrong)


def output(tokens: list[int], logprobs: list[float], *, reason: str | None = None, prompt: Any = None) -> Any:
    """One step's `EngineCoreOutput`, as far as it is read; vLLM puts the sampled token first and others behind it."""
    sampled = SimpleNamespace(logprobs=np.array([[value, 9.0] for value in logprobs], np.float32)) if tokens else None
    return SimpleNamespace(
        new_token_ids=tokens, new_logprobs=sampled, new_prompt_logprobs_tensors=prompt, finish_reason=reason
    )


def test_generated_grows_by_step() -> None:
    generated = Generated(key="a")
    generated.take(output([5], [-0.5]))
    generated.take(output([], [], prompt=SimpleNamespace(logprobs=torch.tensor([[-1.0, 9.0], [-2.0, 9.0]]))))
    generated.take(output([6, 7], [-0.25, -0.125], reason="stop"))
    assert generated.token_ids == [5, 6, 7]
    assert generated.logprobs == [-0.5, -0.25, -0.125]
    assert generated.prompt_logprobs is not None
    assert generated.prompt_logprobs.tolist() == [-1.0, -2.0]
    assert generated.finish_reason == "stop"
