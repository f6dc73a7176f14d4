"""How far two sets of tensors are apart: in size, in direction and in scale, tensor by tensor and as a whole.

Size alone says that two gradients differ. Direction and scale say how: parallel gradients of another length are a wrong
denominator or learning rate, equal length in another direction is other data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDistance:
    """Two tensors a and b of one name, in float64."""

    name: str
    norm_a: float
    norm_b: float
    relative: float  # |a - b| / |a|, L2; 0 where both are 0, inf where only a is, NaN with a non-finite entry
    cosine: float  # of the angle between them; NaN where either is 0
    scale: float  # the c that brings c·a nearest to b: <a, b> / <a, a>; NaN where a is 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDistance:
    """All tensors of a kind: as one long vector, and each for itself, the relatively farthest first."""

    whole: TensorDistance
    tensors: tuple[TensorDistance, ...]


def state_distance(
    names: Sequence[str], read_a: Callable[[str], torch.Tensor], read_b: Callable[[str], torch.Tensor]
) -> StateDistance:
    """Distance of two states, holding one tensor of each at a time.

    Args:
        names: All tensor names, in any order.
        read_a: Name → full tensor of the first.
        read_b: Of the second.

    Raises:
        ValueError: a tensor has two shapes.
    """
    tensors = []
    totals = torch.zeros(4, dtype=torch.float64)
    for name in names:
        a, b = read_a(name), read_b(name)
        if a.shape != b.shape:
            raise ValueError(f"tensor {name!r} has shape {tuple(a.shape)} and {tuple(b.shape)}")
        a, b = a.flatten().double(), b.flatten().double()
        sums = torch.stack([a @ a, b @ b, a @ b, (a - b).square().sum()])
        totals += sums
        tensors.append(_distance(name, sums))
    tensors.sort(key=lambda tensor: -tensor.relative if math.isfinite(tensor.relative) else -math.inf)
    return StateDistance(whole=_distance("all tensors", totals), tensors=tuple(tensors))


def _distance(name: str, sums: torch.Tensor) -> TensorDistance:
    aa, bb, ab, apart = sums.tolist()
    relative = math.sqrt(apart / aa) if aa else math.nan if math.isnan(apart) else math.inf if apart else 0.0
    return TensorDistance(
        name=name,
        norm_a=math.sqrt(aa),
        norm_b=math.sqrt(bb),
        relative=relative,
        cosine=ab / math.sqrt(aa * bb) if aa * bb else math.nan,
        scale=ab / aa if aa else math.nan,
    )
