"""How far two sets of tensors are apart: in size, in direction and in scale, tensor by tensor and as a whole.

Size alone says that two gradients differ. Direction and scale say how: parallel gradients of another length are a wrong
denominator or learning rate, equal length in another direction is other data. As in `probe`, b is the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

_CHUNK = 1 << 24  # elements that are widened to float64 at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDistance:
    """Tensors a and b of one name, in float64. With a non-finite entry in either everything but the norms is NaN."""

    name: str
    norm_a: float
    norm_b: float
    relative: float  # |a - b| / |b|, L2; 0 where both are 0, inf where only b is
    cosine: float  # of the angle between them; NaN where either is 0
    scale: float  # the c that brings c·b nearest to a: <a, b> / <b, b>; NaN where b is 0


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
        read_b: Of the second, the reference.

    Raises:
        ValueError: there are no names, or a tensor has two shapes.
    """
    if not names:
        raise ValueError("no tensors to compare: two empty states would be equal")
    tensors = []
    totals = torch.zeros(4, dtype=torch.float64)
    for name in names:
        sums = _sums(name, read_a(name), read_b(name))
        totals += sums
        tensors.append(_distance(name, sums))
    tensors.sort(key=lambda tensor: -tensor.relative if math.isfinite(tensor.relative) else -math.inf)
    return StateDistance(whole=_distance("all tensors", totals), tensors=tuple(tensors))


def _sums(name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[4] float64: <a, a>, <b, b>, <a, b>, |a - b|²."""
    if a.shape != b.shape:
        raise ValueError(f"tensor {name!r} has shape {tuple(a.shape)} and {tuple(b.shape)}")
    sums = torch.zeros(4, dtype=torch.float64)
    for part_a, part_b in zip(a.flatten().split(_CHUNK), b.flatten().split(_CHUNK), strict=True):
        x, y = part_a.double(), part_b.double()
        sums += torch.stack([x @ x, y @ y, x @ y, (x - y).square().sum()])
    return sums


def _distance(name: str, sums: torch.Tensor) -> TensorDistance:
    aa, bb, ab, apart = sums.tolist()
    finite = math.isfinite(apart)
    relative = math.sqrt(apart / bb) if bb else math.inf if apart else 0.0
    return TensorDistance(
        name=name,
        norm_a=math.sqrt(aa),
        norm_b=math.sqrt(bb),
        relative=relative if finite else math.nan,
        cosine=ab / math.sqrt(aa * bb) if finite and aa * bb else math.nan,
        scale=ab / bb if finite and bb else math.nan,
    )
