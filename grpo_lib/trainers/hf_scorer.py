"""A plain Hugging Face forward: the judge that shares no code with trainer or engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

_BATCH_TOKENS = 16_384  # tokens per forward
_HEAD_TOKENS = 1_024  # tokens whose fp32 logits exist at a time


class HfScorer:
    """Scores each document alone, in fp32 log-softmax, with no packing, no cache and no mask.

    Documents of one length share a forward, so that nothing is padded.

    Args:
        model_path: Hugging Face folder.
        dtype: Weights and activations.
        temperature: Logits are divided by it.
        fp32_head: fp32 logits from bfloat16 hidden states.
        device: ``"cpu"`` or ``"cuda"``.
    """

    def __init__(
        self, model_path: Path, *, dtype: str, temperature: float, fp32_head: bool = False, device: str = "cpu"
    ) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, dtype))
        self._model = model.eval().to(device)
        self._temperature, self._fp32_head, self._device = temperature, fp32_head, device

    @torch.no_grad()
    def score(self, sequences: Sequence[tuple[Sequence[int], int]]) -> list[np.ndarray]:
        """Log-probabilities of given tokens.

        Args:
            sequences: (token ids, number of prompt tokens) pairs.

        Returns:
            For each pair the [R] float32 log-probabilities of the tokens after the prompt.
        """
        by_length: dict[int, list[int]] = {}
        for index, (token_ids, _) in enumerate(sequences):
            by_length.setdefault(len(token_ids), []).append(index)
        scores: list[np.ndarray] = [np.zeros(0, np.float32)] * len(sequences)
        for length, indices in by_length.items():
            per_forward = max(1, _BATCH_TOKENS // length)
            for start in range(0, len(indices), per_forward):
                chunk = indices[start : start + per_forward]
                ids = torch.tensor([list(sequences[i][0]) for i in chunk], device=self._device)
                logprobs = self._forward(ids).cpu()
                for row, index in zip(logprobs, chunk, strict=True):
                    scores[index] = row[sequences[index][1] - 1 :].numpy()
        return scores

    def _forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[B, L] ids → [B, L - 1] float32: entry t is the log-probability of token t + 1."""
        hidden = self._model.model(input_ids=token_ids, use_cache=False).last_hidden_state[:, :-1]
        labels = token_ids[:, 1:]
        parts = zip(hidden.flatten(0, 1).split(_HEAD_TOKENS), labels.flatten().split(_HEAD_TOKENS), strict=True)
        return torch.cat([self._head(rows, wanted) for rows, wanted in parts]).view(labels.shape)

    def _head(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[n, D], [n] → [n] float32."""
        head = self._model.lm_head
        if self._fp32_head:  # the families here have no bias and no scale in their head
            logits = torch.nn.functional.linear(hidden.float(), head.weight.float())
        else:
            logits = head(hidden).float()
        return (logits / self._temperature).log_softmax(-1).gather(-1, labels[:, None])[:, 0]
