"""A rank's share of the training state, the same for every backend and sharding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """Elements [start, start + numel) of a flattened parameter, without gradient history, writable in place."""

    start: int
    values: torch.Tensor  # [numel]


def load_part(part: Part, read: Callable[[int, int], torch.Tensor]) -> None:
    """Fill a part with `read(start, stop)` of the flattened tensor."""
    if part.values.numel():
        part.values.copy_(read(part.start, part.start + part.values.numel()))
