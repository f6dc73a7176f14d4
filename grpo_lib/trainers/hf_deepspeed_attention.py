"""Attention within documents for transformers' models: a packed document gets what it gets alone.

transformers' own attention for packed rows builds a [T, T] mask: the same result in exact arithmetic, but summed in
another order, which moves single log-probabilities of a small fp32 model by up to 2e-5, and work and memory that grow
with the squared row. Here documents of one length go through plain causal attention together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from grpo_lib.errors import GrpoError

DOCUMENT_ATTENTION = "grpo_documents"  # the name of `attn_implementation`


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DocumentGroups:
    """Places of documents in the flattened rows, those of one length together.

    Positions 0 1 0 1 2 0 1: groups ``[[0, 1], [5, 6]]`` and ``[[2, 3, 4]]``, ``restore = [0, 1, 4, 5, 6, 2, 3]``.
    """

    groups: tuple[torch.Tensor, ...]  # each [documents, length] int64
    restore: torch.Tensor  # [B·T] int64: where each place stands in the flattened groups

    @staticmethod
    def of(position_ids: torch.Tensor) -> DocumentGroups:
        """From positions [B, T] that are 0 at the start of each document and of each row; padding is a document too."""
        flat = position_ids.flatten().cpu()
        starts = torch.nonzero(flat == 0)[:, 0]
        lengths = torch.cat([starts, torch.tensor([len(flat)])]).diff()
        groups = tuple(starts[lengths == length, None] + torch.arange(int(length)) for length in lengths.unique())
        restore = torch.cat([group.flatten() for group in groups]).argsort()
        device = position_ids.device
        return DocumentGroups(groups=tuple(group.to(device) for group in groups), restore=restore.to(device))


def document_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    documents: DocumentGroups | None = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: [B, heads, T, head_dim] → [B, T, heads, head_dim].

    Args:
        documents: Passed to the model's forward, which hands it down to every layer.

    Raises:
        GrpoError: the boundaries did not arrive here.
    """
    del module, options
    if documents is None or attention_mask is not None:
        raise GrpoError("attention was called without document boundaries: packed documents would see each other")
    flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]  # [B·T, heads, head_dim]
    outputs = []
    for group in documents.groups:
        q, k, v = (tensor[group].transpose(1, 2) for tensor in flat)
        attended = scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, documents.restore).view(query.transpose(1, 2).shape), None


def _no_mask(*args: object, **options: object) -> None:
    """No layer needs a mask: boundaries travel as `documents`."""


AttentionInterface.register(DOCUMENT_ATTENTION, document_attention)
AttentionMaskInterface.register(DOCUMENT_ATTENTION, _no_mask)
