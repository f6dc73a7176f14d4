"""The documents of a micro-batch as one row, and the indices that lead into it and back.

All indices are worked out on the host, where the batch is. On the device a boolean mask would have to be counted first,
which makes the host wait for everything that is queued there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from grpo_lib.trainers.labels import IGNORED_LABEL, document_starts

# Kernels work in tiles of up to 256 tokens, and the allocator finds blocks of few different sizes again.
ROW_MULTIPLE = 256


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JoinedDocuments:
    """The documents of a micro-batch as one row without their packs' padding: all that a model computes on.

    Attention and rotary positions follow the documents' lengths, so rows mean nothing to them. Rows of
    ``doc_ids = [[1, 1, 2, 0], [1, 1, 1, 0]]`` join to 6 tokens with ``lens = [[2, 1, 3]]``, and padded to a multiple of
    4 to 8 tokens with ``lens = [[2, 1, 3, 2]]``.
    """

    is_kept: torch.Tensor  # [B, T] bool: tokens of documents, in row-major order the joined row
    lens: torch.Tensor  # [1, documents] int64, adding up to the length of the row
    num_padding: int = 0  # tokens after the kept ones, a document of their own

    @staticmethod
    def of(doc_ids: torch.Tensor, position_ids: torch.Tensor) -> JoinedDocuments:
        """From label-aligned [B, T] int64 tensors on CPU; a micro-batch of padding keeps its first token.

        Something must be kept, or the rank would have no backward pass and the others would wait for it.

        Raises:
            ValueError: the position ids do not restart at 0 with every run of equal doc ids. OLMo-core derives
                positions from the lengths.
        """
        is_start = document_starts(doc_ids, position_ids)
        is_kept = doc_ids > 0
        if not is_kept.any():
            is_kept[0, 0] = True
        starts = torch.nonzero(is_start[is_kept])[:, 0]
        return JoinedDocuments(is_kept=is_kept, lens=starts.diff(append=is_kept.sum()[None])[None])

    def padded_to(self, multiple: int) -> JoinedDocuments:
        """The same documents, followed by fewer than `multiple` tokens of padding."""
        num_padding = -int(self.lens.sum()) % multiple
        if num_padding == 0:
            return self
        lens = torch.cat([self.lens, self.lens.new_tensor([[num_padding]])], dim=1)
        return replace(self, lens=lens, num_padding=num_padding)

    @property
    def max_len(self) -> int:
        return int(self.lens.max())

    def positions(self) -> torch.Tensor:
        """[1, N] int64, restarting at 0 with each document."""
        lens = self.lens[0]
        return (torch.arange(int(lens.sum())) - torch.repeat_interleave(lens.cumsum(0) - lens, lens))[None]

    def joined(self, tokens: torch.Tensor) -> torch.Tensor:
        """[B, T] → [1, N], with zeros for the padding."""
        return torch.cat([tokens[self.is_kept], tokens.new_zeros(self.num_padding)])[None]

    def in_rows(self, row: torch.Tensor) -> torch.Tensor:
        """[1, N, …] → [B, T, …] with zeros outside the documents, on the row's device."""
        places = copied_to(torch.nonzero(self.is_kept.flatten())[:, 0], row.device)
        rows = row.new_zeros(self.is_kept.numel(), *row.shape[2:])
        return rows.index_copy_(0, places, row[0, : len(places)]).view(*self.is_kept.shape, *row.shape[2:])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WantedLabels:
    """The labels that are asked for, and where they are: in what the model computes on, and in the batch.

    With the rows above and labels wanted at the batch's places ``(0, 1)`` and ``(1, 0)``: ``positions = [1, 3]``,
    ``places = [1, 4]``.
    """

    labels: torch.Tensor  # [n] int64
    positions: torch.Tensor  # [n] int64, in the flattened row
    places: torch.Tensor  # [n] int64, in the flattened [B, T]
    shape: tuple[int, ...]  # [B, T]

    @staticmethod
    def of(labels: torch.Tensor, documents: JoinedDocuments | None, device: torch.device) -> WantedLabels:
        """From [B, T] labels on CPU, `IGNORED_LABEL` where nothing is asked.

        Args:
            documents: What the model computes on, which leaves out padding and the labels there; None: the rows.
        """
        kept = torch.ones_like(labels, dtype=torch.bool) if documents is None else documents.is_kept
        is_wanted = (labels != IGNORED_LABEL) & kept
        return WantedLabels(
            labels=copied_to(labels[is_wanted], device),
            positions=copied_to(torch.nonzero(is_wanted[kept])[:, 0], device),
            places=copied_to(torch.nonzero(is_wanted.flatten())[:, 0], device),
            shape=tuple(labels.shape),
        )

    def in_rows(self, values: torch.Tensor) -> torch.Tensor:
        """[n] → [B, T], 0 where nothing was asked; differentiable."""
        zeros = values.new_zeros(self.shape).view(-1)
        return zeros.index_copy(0, self.places, values).view(self.shape)


def copied_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor on the device. From pinned memory, so that the host does not wait for the work queued there."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
