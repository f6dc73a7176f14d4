"""What the parts of a loss see of a micro-batch: finite everywhere, and 0 where nothing is trained."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from grpo_lib.types import PackedBatch

# A ratio past exp(20) has no meaning left, and exp overflows float32 at 88; inf times a zero advantage is NaN.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenTerms:
    """Label-aligned log-probabilities and advantages of B packs of T tokens."""

    new: torch.Tensor  # [B, T], with gradient
    old: torch.Tensor  # [B, T], proximal policy; the current one, detached, when the batch carries none
    rollout: torch.Tensor  # [B, T]
    advantages: torch.Tensor  # [B, T]
    mask: torch.Tensor  # [B, T] bool
    doc_ids: torch.Tensor  # [B, T] int64
    num_docs: int  # most documents in any row

    @staticmethod
    def of(logprobs: torch.Tensor, batch: PackedBatch) -> TokenTerms:
        """Select trained tokens before any arithmetic.

        Untrained positions may hold -inf or NaN. Selecting afterwards leaves NaN in the gradient, and multiplying by
        the mask leaves it in the loss (verl 721).
        """
        mask = batch.response_mask
        new = torch.where(mask, logprobs, 0)
        old = new.detach() if batch.old_logprobs is None else torch.where(mask, batch.old_logprobs, 0)
        return TokenTerms(
            new=new,
            old=old,
            rollout=torch.where(mask, batch.rollout_logprobs, 0),
            advantages=torch.where(mask, batch.advantages, 0),
            mask=mask,
            doc_ids=batch.doc_ids,
            num_docs=max(len(row) for row in batch.sample_ids),
        )

    def token_ratio(self) -> torch.Tensor:
        """r = new / old of each token, [B, T] with gradient; 1 outside the mask."""
        return (self.new - self.old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()

    def document_mean(self, values: torch.Tensor) -> torch.Tensor:
        """[B, T]: the mean of `values` over the trained tokens of the document each position belongs to."""
        shape = (values.shape[0], self.num_docs + 1)
        totals = values.new_zeros(shape).scatter_add(1, self.doc_ids, torch.where(self.mask, values, 0))
        counts = values.new_zeros(shape).scatter_add(1, self.doc_ids, self.mask.to(values.dtype))
        return (totals / counts.clamp(min=1)).gather(1, self.doc_ids)
