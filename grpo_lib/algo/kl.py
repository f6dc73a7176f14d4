"""Estimators of KL(policy ‖ reference) per token, from samples of the policy.

Source: John Schulman, "Approximating KL divergence", joschu.net/blog/kl-approx.html.

Each takes d = clamp(new - reference, ±40), [B, T] with gradient, and the ratio new / old, [B, T] with gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

import torch

KlKind = Literal["k1", "k2", "k3", "k3_weighted"]
KlEstimator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_MAX_LOG_RATIO = 40.0  # exp(40) is far from overflow in float32


def log_ratio_to_reference(new: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """d of the estimators."""
    return (new - reference).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def k1(d: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
    """d: unbiased, of either sign."""
    return d


def k2(d: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
    """d² / 2: biased, low variance, and its gradient is that of the KL on policy."""
    return d.square() / 2


def k3(d: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
    """exp(-d) - 1 + d: unbiased and never negative; expm1 keeps small d exact."""
    return torch.expm1(-d) + d


def k3_weighted(d: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
    """ratio · d: k1 reweighted from the proximal to the current policy."""
    return ratio * d


KL_ESTIMATORS: Mapping[KlKind, KlEstimator] = MappingProxyType(
    {"k1": k1, "k2": k2, "k3": k3, "k3_weighted": k3_weighted}
)
