"""Policy surrogates: the loss of each token before correction and KL, and where its clip is active.

`grpo` arXiv 2402.03300, `dapo` arXiv 2503.14476, `cispo` arXiv 2506.13585, `dr_grpo` arXiv 2503.20783, `gspo` arXiv
2507.18071. All are sums over tokens; averaging is the caller's `loss_denominator`, which is all that `dr_grpo` changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from grpo_lib.algo.terms import MAX_LOG_RATIO, TokenTerms

if TYPE_CHECKING:
    from grpo_lib.config import AlgorithmConfig

Surrogate = Callable[[TokenTerms], tuple[torch.Tensor, torch.Tensor]]
"""Terms → (loss [B, T] with gradient, clip active [B, T] bool)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedRatio:
    """max(-A·r, -A·clip(r, 1 - lower, 1 + higher)): no gain from moving further once the ratio has left the band."""

    ratio: Callable[[TokenTerms], torch.Tensor]
    lower: float
    higher: float

    def __call__(self, terms: TokenTerms) -> tuple[torch.Tensor, torch.Tensor]:
        ratio = self.ratio(terms)
        plain = -terms.advantages * ratio
        clipped = -terms.advantages * ratio.clamp(1 - self.lower, 1 + self.higher)
        return torch.maximum(plain, clipped), clipped > plain


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedWeight:
    """-A·min(sg(r), 1 + higher)·log π: the weight is cut, so every token keeps a gradient (CISPO)."""

    higher: float

    def __call__(self, terms: TokenTerms) -> tuple[torch.Tensor, torch.Tensor]:
        ratio = terms.token_ratio().detach()
        weight = ratio.clamp(max=1 + self.higher)
        return -terms.advantages * weight * terms.new, ratio > weight


def sequence_ratio(terms: TokenTerms) -> torch.Tensor:
    """GSPO's ratio in its token form: s of the document in value, d s = s · d log π of the token in gradient.

    s = exp(mean of new - old over the document's trained tokens), so it does not grow with length.
    """
    log_ratio = terms.document_mean((terms.new - terms.old).detach()) + (terms.new - terms.new.detach())
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def build_surrogate(cfg: AlgorithmConfig) -> Surrogate:
    """The configured surrogate. `grpo` and `dr_grpo` clip by `clip_lower` on both sides, `cispo` only above."""
    return _BUILDERS[cfg.loss](cfg)


def _symmetric(cfg: AlgorithmConfig) -> Surrogate:
    return ClippedRatio(ratio=TokenTerms.token_ratio, lower=cfg.clip_lower, higher=cfg.clip_lower)


def _asymmetric(cfg: AlgorithmConfig) -> Surrogate:
    return ClippedRatio(ratio=TokenTerms.token_ratio, lower=cfg.clip_lower, higher=cfg.clip_higher)


def _cispo(cfg: AlgorithmConfig) -> Surrogate:
    return ClippedWeight(higher=cfg.clip_higher)


def _gspo(cfg: AlgorithmConfig) -> Surrogate:
    return ClippedRatio(ratio=sequence_ratio, lower=cfg.clip_lower, higher=cfg.clip_higher)


_BUILDERS: Mapping[str, Callable[[AlgorithmConfig], Surrogate]] = MappingProxyType(
    {"grpo": _symmetric, "dr_grpo": _symmetric, "dapo": _asymmetric, "cispo": _cispo, "gspo": _gspo}
)
