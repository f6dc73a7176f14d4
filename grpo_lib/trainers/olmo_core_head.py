"""An OLMo-core output head that returns log-probabilities of labels instead of logits.

It runs inside the model's forward, where FSDP2 has the head's weight gathered (with tied embeddings the weight belongs
to the root and is freed as soon as the root's forward returns). Logits therefore exist for one chunk at a time, in the
compute dtype, and are widened to fp32 chunk by chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from olmo_core.nn.lm_head import LMHead, LMHeadConfig

from grpo_lib.algo.logprobs import token_logprobs
from grpo_lib.trainers.labels import IGNORED_LABEL


class TokenLogprobHead(LMHead):
    """Final norm, projection and temperature-scaled log-softmax, for the labels that are asked for."""

    def __init__(self, *, temperature: float, chunk_tokens: int, **head_options: object) -> None:
        super().__init__(**head_options)  # pyright: ignore[reportArgumentType] passed through from LMHeadConfig.build
        self._temperature, self._chunk_tokens = temperature, chunk_tokens

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] OLMo-core's Transformer passes the result through
        self, x: torch.Tensor, *, labels: torch.Tensor, **loss_options: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy of each label.

        Args:
            x: [B, T, d_model] hidden states.
            labels: [B, T] int64; positions with `IGNORED_LABEL` are not projected.
            loss_options: OLMo-core's loss settings, which do not apply.

        Returns:
            logprobs [B, T] float32 with gradient and entropy [B, T] float32 without; 0 at ignored positions. Without
            any label they still have a graph to the weights, so that this rank joins the backward's collectives.
        """
        wanted = labels != IGNORED_LABEL
        hidden = x[wanted]
        if self.norm is not None:
            hidden = self.norm(hidden)
        logprobs, entropy = token_logprobs(
            hidden, self.w_out, labels[wanted], temperature=self._temperature, chunk_tokens=self._chunk_tokens
        )
        zeros = logprobs.new_zeros(labels.shape)
        return zeros.masked_scatter(wanted, logprobs), zeros.masked_scatter(wanted, entropy)


@dataclass
class TokenLogprobHeadConfig(LMHeadConfig):
    """Builds a `TokenLogprobHead` where OLMo-core would build its default head."""

    temperature: float = 1.0
    chunk_tokens: int = 1024

    @classmethod
    def extending(cls, head: LMHeadConfig, *, temperature: float, chunk_tokens: int) -> TokenLogprobHeadConfig:
        return cls(
            layer_norm=head.layer_norm,
            bias=head.bias,
            dtype=head.dtype,
            temperature=temperature,
            chunk_tokens=chunk_tokens,
        )

    def build(self, *, d_model: int, vocab_size: int, init_device: str = "cpu") -> TokenLogprobHead:
        return TokenLogprobHead(
            temperature=self.temperature,
            chunk_tokens=self.chunk_tokens,
            d_model=d_model,
            vocab_size=vocab_size,
            layer_norm=self.layer_norm,
            dtype=self.dtype.as_pt(),
            bias=self.bias,
            init_device=init_device,
        )
