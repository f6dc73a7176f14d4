"""Hidden states of two forward passes over the same rows: the first layer, document and position where they part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from grpo_lib.types import PackedBatch

Layers = Mapping[str, torch.Tensor]  # "embedding", "layer 0" … → [B, T, D], of one micro-batch


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDifference:
    """One layer of two forward passes; b is the reference."""

    layer: str
    max_abs: float
    relative: float  # largest over tokens of |a - b| / |b|, L2 over the hidden dimension
    parts_at: str  # document and position of the first token over the tolerance, in pack order; empty = none


def layer_differences(
    batches: Sequence[PackedBatch], a: Sequence[Layers], b: Sequence[Layers], *, tolerance: float
) -> list[LayerDifference]:
    """A row per layer, in the order of the forward pass.

    Args:
        a: Of each micro-batch.
        b: Likewise, the reference.
        tolerance: Largest relative difference of a token that is rounding.

    Raises:
        ValueError: the two do not have the same layers.
    """
    names = list(b[0])
    for index, (of_a, of_b) in enumerate(zip(a, b, strict=True)):
        if list(of_a) != names or list(of_b) != names:
            raise ValueError(f"micro-batch {index} has the layers {list(of_a)} and {list(of_b)}")
    return [_layer(name, batches, [of_a[name] for of_a in a], [of_b[name] for of_b in b], tolerance) for name in names]


def parting(differences: Sequence[LayerDifference]) -> str:
    """Where the hidden states part first, as text."""
    for difference in differences:
        if difference.parts_at:
            return (
                f"hidden states part at {difference.layer} ({difference.relative:.2g} relative), first at "
                f"{difference.parts_at}"
            )
    return (
        "hidden states agree in every layer: what differs comes after the last block (norm, head, labels, temperature)"
    )


def layer_rows(name: str, differences: Sequence[LayerDifference]) -> list[dict[str, object]]:
    """The table, for a report."""
    return [
        {
            "scorer": name,
            "layer": difference.layer,
            "max_abs": difference.max_abs,
            "relative": difference.relative,
            "parts_at": difference.parts_at,
        }
        for difference in differences
    ]


def _layer(
    layer: str, batches: Sequence[PackedBatch], a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], tolerance: float
) -> LayerDifference:
    largest, relative, parts_at = 0.0, 0.0, ""
    for batch, of_a, of_b in zip(batches, a, b, strict=True):
        is_real = batch.doc_ids > 0
        if not is_real.any():
            continue
        apart = of_a.double() - of_b.double()
        by_token = torch.where(is_real, apart.norm(dim=-1) / of_b.double().norm(dim=-1).clamp_min(1e-30), 0.0)
        largest = max(largest, float(apart[is_real].abs().max()))
        relative = max(relative, float(by_token.max()))
        over = torch.nonzero(is_real & ~(by_token <= tolerance))
        if len(over) and not parts_at:
            row, position = over[0].tolist()
            doc_id = int(batch.doc_ids[row, position])
            parts_at = (
                f"token {int((batch.doc_ids[row, :position] == doc_id).sum())} of document {doc_id} of row {row} "
                f"({batch.sample_ids[row][doc_id - 1]})"
            )
    return LayerDifference(layer=layer, max_abs=largest, relative=relative, parts_at=parts_at)
