"""The policy loss: surrogate × correction + beta · KL, composed once from the config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from grpo_lib.algo.corrections import Correction, build_correction
from grpo_lib.algo.host_copy import HostCopy
from grpo_lib.algo.kl import KL_ESTIMATORS, KlEstimator, log_ratio_to_reference
from grpo_lib.algo.surrogates import Surrogate, build_surrogate
from grpo_lib.algo.terms import TokenTerms
from grpo_lib.interfaces import PolicyLoss
from grpo_lib.types import PackedBatch, Stat, StepMetrics

if TYPE_CHECKING:
    from grpo_lib.config import AlgorithmConfig


def build_loss(cfg: AlgorithmConfig) -> PolicyLoss:
    """The configured loss; picklable, so that the driver builds it once for all ranks."""
    policy = CorrectedSurrogate(surrogate=build_surrogate(cfg), correction=build_correction(cfg))
    if cfg.kl_beta == 0:
        return policy
    return WithKl(policy=policy, estimator=KL_ESTIMATORS[cfg.kl_estimator], beta=cfg.kl_beta)


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectedSurrogate:
    """sum over trained tokens of surrogate × correction, over `loss_denominator`."""

    surrogate: Surrogate
    correction: Correction

    def __call__(
        self, logprobs: torch.Tensor, batch: PackedBatch, loss_denominator: float
    ) -> tuple[torch.Tensor, StepMetrics]:
        terms = TokenTerms.of(logprobs, batch)
        token_loss, shares = self.tokens(terms)
        return _masked_sum(token_loss, terms.mask) / _positive(loss_denominator), _token_means(terms.mask, shares)

    def tokens(self, terms: TokenTerms) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss of each token [B, T], and the per-token values [B, T] whose means are reported."""
        surrogate, clipped = self.surrogate(terms)
        token_loss, limited = self.correction(terms, surrogate)
        values = {"loss/policy": token_loss, "policy/clipfrac": clipped, self.correction.metric: limited}
        return token_loss, values


@dataclass(frozen=True, slots=True, kw_only=True)
class WithKl:
    """A policy loss plus beta times an estimate of KL(policy ‖ reference)."""

    policy: CorrectedSurrogate
    estimator: KlEstimator
    beta: float

    def __call__(
        self, logprobs: torch.Tensor, batch: PackedBatch, loss_denominator: float
    ) -> tuple[torch.Tensor, StepMetrics]:
        if batch.ref_logprobs is None:
            raise ValueError(
                f"algorithm.kl_beta is {self.beta} but the batch carries no ref_logprobs; "
                "score it with the reference policy first, or set kl_beta to 0"
            )
        terms = TokenTerms.of(logprobs, batch)
        token_loss, values = self.policy.tokens(terms)
        d = log_ratio_to_reference(terms.new, torch.where(terms.mask, batch.ref_logprobs, 0))
        kl = self.estimator(d, terms.token_ratio())
        loss = _masked_sum(token_loss + self.beta * kl, terms.mask) / _positive(loss_denominator)
        return loss, _token_means(terms.mask, {**values, "loss/kl": kl})


def _masked_sum(token_loss: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum over trained tokens; 0 with a graph when there are none, so that every rank's backward pass runs."""
    return torch.where(mask, token_loss, 0).sum()


@torch.no_grad()
def _token_means(mask: torch.Tensor, values: dict[str, torch.Tensor]) -> StepMetrics:
    """Means over trained tokens, mergeable by their counts."""
    rows = [torch.where(mask, value, 0).sum(dtype=torch.float64) for value in values.values()]
    return StepMetrics(stats=_LaterMeans(tuple(values), torch.stack([*rows, mask.sum(dtype=torch.float64)])))


class _LaterMeans(Mapping[str, Stat]):
    """Means whose sums the host waits for when the first of them is read: a GPU's backward pass is queued by then.

    Args:
        sums: [names + 1] float64; the last is the number of tokens.
    """

    def __init__(self, names: tuple[str, ...], sums: torch.Tensor) -> None:
        self._names, self._sums = names, HostCopy(sums)

    @cached_property
    def _stats(self) -> dict[str, Stat]:
        *totals, weight = self._sums.read().tolist()
        return {name: Stat.mean(total, weight) for name, total in zip(self._names, totals, strict=True)}

    def __getitem__(self, name: str) -> Stat:
        return self._stats[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _positive(loss_denominator: float) -> float:
    if not loss_denominator > 0:
        raise ValueError(f"loss_denominator is {loss_denominator}; a step without trainable tokens is not applied")
    return loss_denominator
