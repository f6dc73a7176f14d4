"""Greedy decoding that reports log-probabilities at the run's temperature.

vLLM picks the argmax when the temperature is 0 and then reports log-probabilities at temperature 1. Dividing the
logits first leaves the argmax alone and makes the report what `SamplingParams.greedy` promises.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

RowProcessor = Callable[[list[int], torch.Tensor], torch.Tensor]  # (tokens so far, [V] logits) → [V] logits
EXTRA_ARG = "greedy_temperature"


class GreedyTemperature(AdapterLogitsProcessor):
    """Divides a greedy request's logits by the temperature named in its extra arguments."""

    def is_argmax_invariant(self) -> bool:
        # True in the mathematical sense, but vLLM skips processors that say so when it decodes greedily.
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RowProcessor | None:
        temperature = (params.extra_args or {}).get(EXTRA_ARG)
        if temperature is None:
            return None

        def divide(_output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            return logits / temperature

        return divide
