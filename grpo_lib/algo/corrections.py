"""Importance corrections for tokens that the engine sampled and the trainer scores slightly differently.

rho = exp(clamp(old - rollout, ±10)) is the ratio of the proximal policy to the sampler, without gradient. A correction
weighs each token's policy loss by it. Truncated importance sampling: fengyao.notion.site/off-policy-rl; the token mask
is IcePop's: ringtech.notion.site/icepop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import torch

from grpo_lib.algo.mismatch import MAX_LOG_RHO
from grpo_lib.algo.terms import TokenTerms

if TYPE_CHECKING:
    from grpo_lib.config import AlgorithmConfig

_BOUNDED, _MASKED = "correction/bounded_share", "correction/masked_share"


class Correction(Protocol):
    """Weighs token losses; pure and picklable."""

    @property
    def metric(self) -> str:
        """Name of the share of trained tokens that the second result marks."""
        ...

    def __call__(self, terms: TokenTerms, token_loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(corrected loss [B, T], tokens whose weight hit its bound or that were masked out [B, T] bool)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedWeight:
    """Weight clip(rho, lower, cap); tis has no lower bound. With `per_document` rho is exp(mean log-ratio).

    The mean, because the exponential of a document's *sum* goes to 0 or to the bound as it gets longer (NeMo-RL 2269).
    """

    cap: float
    lower: float = 0.0
    per_document: bool = False
    metric: str = _BOUNDED

    def __call__(self, terms: TokenTerms, token_loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rho = _rho(terms, per_document=self.per_document)
        return token_loss * rho.clamp(self.lower, self.cap), (rho > self.cap) | (rho < self.lower)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMask:
    """IcePop: weight rho inside [1 / cap, cap]; a token outside leaves the loss, though not the denominator."""

    cap: float
    metric: str = _MASKED

    def __call__(self, terms: TokenTerms, token_loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rho = _rho(terms, per_document=False)
        masked = (rho > self.cap) | (rho < 1 / self.cap)
        return torch.where(masked, 0, token_loss * rho), masked


@dataclass(frozen=True, slots=True, kw_only=True)
class NoCorrection:
    """Trust that the sampler's distribution is the proximal policy's."""

    metric: str = _BOUNDED

    def __call__(self, terms: TokenTerms, token_loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token_loss, torch.zeros_like(terms.mask)


def build_correction(cfg: AlgorithmConfig) -> Correction:
    """The configured correction."""
    return _BUILDERS[cfg.correction](cfg.correction_cap)


def _rho(terms: TokenTerms, *, per_document: bool) -> torch.Tensor:
    log_rho = (terms.old - terms.rollout).detach()
    if per_document:
        log_rho = terms.document_mean(log_rho)
    return log_rho.clamp(-MAX_LOG_RHO, MAX_LOG_RHO).exp()


def _tis(cap: float) -> Correction:
    return BoundedWeight(cap=cap)


def _two_sided(cap: float) -> Correction:
    return BoundedWeight(cap=cap, lower=1 / cap)


def _mask(cap: float) -> Correction:
    return TokenMask(cap=cap)


def _sequence(cap: float) -> Correction:
    return BoundedWeight(cap=cap, lower=1 / cap, per_document=True)


def _off(cap: float) -> Correction:
    return NoCorrection()


_BUILDERS: Mapping[str, Callable[[float], Correction]] = MappingProxyType(
    {"tis": _tis, "two_sided": _two_sided, "mask": _mask, "sequence": _sequence, "off": _off}
)
