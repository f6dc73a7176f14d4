"""What a forward pass over packed documents can get wrong, as data, and what each fault makes of a batch.

A comparison that found a difference asks an independent model to make the same mistake on purpose: the mistake whose
result is the suspect's is the cause. Pure: the batch is rewritten here, the forward is the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from grpo_lib.types import PackedBatch


class Sight(StrEnum):
    """How far back a token attends."""

    DOCUMENT = "document"  # as it should be
    ROW = "row"  # every earlier token of its row
    MICRO_BATCH = "micro-batch"  # every earlier token of all rows, where a trainer joins them to one


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The default is a forward as configured; every field that differs from it is one mistake."""

    sight: Sight = Sight.DOCUMENT
    positions_restart: bool = True
    label_shift: int = 0  # position t is scored against `labels[t + label_shift]` of its row
    temperature: float | None = None  # instead of the configured one
    version: int | None = None  # weights of this policy version
    tensors: tuple[str, ...] = ()  # only these of it, by Hugging Face name; empty = all
    bf16_weights: bool = False  # weights rounded to bfloat16, arithmetic unchanged
    head_version: int | None = None  # a tied output head that holds the embedding of this version
    head_detached: bool = False  # the output head's part of the gradient goes nowhere


def faulty_batch(batch: PackedBatch, fault: Fault) -> PackedBatch:
    """The batch with the fault's labels and position ids; its rows joined where the sight is the micro-batch."""
    if fault.sight is Sight.MICRO_BATCH:
        batch = _joined(batch)
    if not fault.positions_restart:
        positions = torch.arange(batch.position_ids.shape[1]).expand_as(batch.position_ids)
        batch = replace(batch, position_ids=positions.contiguous())
    if fault.label_shift:
        batch = replace(batch, labels=batch.labels.roll(-fault.label_shift, dims=1))
    return batch


def visible_tokens(doc_ids: torch.Tensor, sight: Sight) -> torch.Tensor:
    """[B, T, T] bool from doc ids [B, T]: whether the token of the middle index attends to that of the last; causal.

    Padding is a document of its own for every sight, so that no real token sees it.
    """
    length = doc_ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    segments = doc_ids if sight is Sight.DOCUMENT else (doc_ids > 0).long()
    return causal & (segments[:, :, None] == segments[:, None, :])


def _joined(batch: PackedBatch) -> PackedBatch:
    """All documents as one row without padding, in row-major order, numbered through."""
    is_kept = batch.doc_ids > 0
    offsets = torch.tensor([0, *(len(row) for row in batch.sample_ids)]).cumsum(0)[:-1]
    tensors = {name: tensor[is_kept][None] for name, tensor in batch.tensors().items()}
    tensors["doc_ids"] = (batch.doc_ids + offsets[:, None])[is_kept][None]
    return replace(batch, sample_ids=(tuple(key for row in batch.sample_ids for key in row),), **tensors)
