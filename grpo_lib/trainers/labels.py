"""Which positions of a pack a backend is asked to score, and the check of what it derives documents from."""

from __future__ import annotations

import torch

from grpo_lib.types import PackedBatch

IGNORED_LABEL = -100


def trained_labels(batch: PackedBatch) -> torch.Tensor:
    """[B, T] int64: the labels of trained tokens, `IGNORED_LABEL` elsewhere."""
    return torch.where(batch.response_mask, batch.labels, IGNORED_LABEL)


def successor_labels(batch: PackedBatch) -> torch.Tensor:
    """[B, T] int64: the labels of all tokens with a successor in their document, `IGNORED_LABEL` elsewhere."""
    has_successor = torch.zeros_like(batch.response_mask)
    has_successor[:, :-1] = (batch.doc_ids[:, 1:] == batch.doc_ids[:, :-1]) & (batch.doc_ids[:, 1:] > 0)
    return torch.where(has_successor, batch.labels, IGNORED_LABEL)


def document_starts(doc_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """[B, T] bool: where a document or a run of padding begins.

    Backends take documents from lengths or from positions, never from the ids, so the two must say the same.

    Raises:
        ValueError: the position ids do not restart at 0 with every run of equal doc ids.
    """
    is_start = torch.ones_like(doc_ids, dtype=torch.bool)
    is_start[:, 1:] = doc_ids[:, 1:] != doc_ids[:, :-1]
    index = torch.arange(doc_ids.shape[1]).expand_as(doc_ids)
    expected = index - torch.where(is_start, index, 0).cummax(dim=1).values
    if not torch.equal(position_ids, expected):
        row = int((position_ids != expected).any(1).nonzero()[0])
        raise ValueError(f"row {row}: position_ids do not restart at 0 with every run of equal doc_ids")
    return is_start
