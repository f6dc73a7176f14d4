"""An OLMo-core output head that returns log-probabilities of labels instead of logits.

It runs inside the model's forward, where FSDP2 has the head's weight gathered (with tied embeddings the weight belongs
to the root and is freed as soon as the root's forward returns). Logits therefore exist for one chunk at a time, and are
widened to fp32 chunk by chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from olmo_core.nn.lm_head import LMHead, LMHeadConfig

from grpo_lib.trainers.output_head import HeadOptions, projected_logprobs


class TokenLogprobHead(LMHead):
    """Final norm, projection and temperature-scaled log-softmax, for the labels that are asked for."""

    def __init__(self, *, options: HeadOptions, **head_options: object) -> None:
        super().__init__(**head_options)  # pyright: ignore[reportArgumentType] passed through from LMHeadConfig.build
        self._options = options

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] OLMo-core's Transformer passes the result through
        self, x: torch.Tensor, *, labels: torch.Tensor, logits_to_keep: torch.Tensor, **loss_options: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy of each label.

        Args:
            x: [1, N, d_model] hidden states.
            labels: [1, n] int64.
            logits_to_keep: [1, n] int64: the positions in the row that the labels are for.
            loss_options: OLMo-core's loss settings, which do not apply.

        Returns:
            logprobs [n] float32 with gradient and entropy [n] float32 without. Without any label they still have a
            graph to the weights, so that this rank joins the backward's collectives.
        """
        hidden = x[0].index_select(0, logits_to_keep[0])
        if self.norm is not None:
            hidden = self.norm(hidden)
        return projected_logprobs(hidden, self.w_out.weight, labels[0], self._options)

    def compile(self, *args: object, **kwargs: object) -> None:
        """Left as it is: its time is in products and in kernels of its own, and the number of labels varies."""


@dataclass
class TokenLogprobHeadConfig(LMHeadConfig):
    """Builds a `TokenLogprobHead` where OLMo-core would build its default head."""

    options: HeadOptions | None = None

    @classmethod
    def extending(cls, head: LMHeadConfig, options: HeadOptions) -> TokenLogprobHeadConfig:
        assert not head.bias, "no family here has a bias in its head"
        return cls(layer_norm=head.layer_norm, bias=head.bias, dtype=head.dtype, options=options)

    def build(self, *, d_model: int, vocab_size: int, init_device: str = "cpu") -> TokenLogprobHead:
        assert self.options is not None, "made by `extending`"
        return TokenLogprobHead(
            options=self.options,
            d_model=d_model,
            vocab_size=vocab_size,
            layer_norm=self.layer_norm,
            dtype=self.dtype.as_pt(),
            bias=self.bias,
            init_device=init_device,
        )
