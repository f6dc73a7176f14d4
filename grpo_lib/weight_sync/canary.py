"""The decode canary: do the weights that the engine *decodes* with give the trainer's log-probabilities?

Checksums prove what arrived; only decoding proves what fused, repacked or cached copies made of it. Scores of given
tokens would not do: a prefill can be right while decoding reads freed weights (NeMo-RL 2895).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from grpo_lib.types import CanaryResult, Completion, GenerationRequest, SamplingParams

# requests → by engine, one completion for each request, in any order
Decode = Callable[[Sequence[GenerationRequest]], Sequence[Sequence[Completion]]]
# (prompt token ids, response token ids) pairs → for each pair the trainer's [R] float32 log-probabilities
Score = Callable[[Sequence[tuple[tuple[int, ...], np.ndarray]]], Sequence[np.ndarray]]


class DecodeCanary:
    """Decodes fixed prompts with fixed seeds on every engine and compares with the trainer's scores."""

    def __init__(
        self,
        *,
        prompts: Sequence[tuple[int, ...]],
        sampling: SamplingParams,
        decode: Decode,
        score: Score,
        tolerance: float,
    ) -> None:
        if not prompts:
            raise ValueError("the decode canary needs at least one prompt")
        self._prompts, self._sampling = tuple(prompts), sampling
        self._decode, self._score, self._tolerance = decode, score, tolerance

    def __call__(self, policy_version: int) -> CanaryResult:
        started = time.perf_counter()
        requests = [
            GenerationRequest(
                request_id=f"canary-v{policy_version}-{index}",
                prompt_token_ids=prompt,
                sampling=self._sampling,
                seed=index,
            )
            for index, prompt in enumerate(self._prompts)
        ]
        prompt_of = {request.request_id: request.prompt_token_ids for request in requests}
        completions = [completion for engine in self._decode(requests) for completion in engine]
        scores = self._score([(prompt_of[c.request_id], c.token_ids) for c in completions])
        differences = np.concatenate(
            [np.zeros(0)]
            + [
                np.abs(c.logprobs.astype(np.float64) - np.asarray(score, dtype=np.float64))
                for c, score in zip(completions, scores, strict=True)
            ]
        )
        # A NaN on either side compares as "not larger" and would pass.
        differences = np.where(np.isfinite(differences), differences, np.inf)
        return CanaryResult(
            num_tokens=int(differences.size),
            max_abs=float(differences.max(initial=0.0)),
            mean_abs=float(differences.mean()) if differences.size else 0.0,
            tolerance=self._tolerance,
            seconds=time.perf_counter() - started,
        )
