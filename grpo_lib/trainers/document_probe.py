"""The start-up probe of every backend: two documents in one pack must not see each other."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from grpo_lib.errors import DataError, GrpoError

# Largest |packed - alone| log-probability, nats: rounding only, kernels see other shapes.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-1}


class Scorer(Protocol):
    """The backend's own forward pass on its real, sharded model."""

    def __call__(
        self, input_ids: torch.Tensor, labels: torch.Tensor, doc_ids: torch.Tensor, position_ids: torch.Tensor
    ) -> torch.Tensor:
        """[B, T] log-probabilities of [B, T] labels."""
        ...


def check_documents_stay_apart(score: Scorer, *, vocab_size: int, dtype: torch.dtype, model_path: Path) -> None:
    """Score one document beside another, beside a changed one, and alone; collective.

    Raises:
        DataError: log-probabilities are not finite.
        GrpoError: attention or positions cross document boundaries.
    """
    first, second, padding = 5, 7, 4
    lens = (first, second, padding)
    ids = torch.cat([torch.arange(3, 3 + length) for length in lens])[None] % vocab_size
    other_first = ids.clone()
    other_first[0, :first] = (other_first[0, :first] + 1) % vocab_size
    docs = torch.repeat_interleave(torch.tensor([1, 2, 0]), torch.tensor(lens))[None]
    positions = torch.cat([torch.arange(length) for length in lens])[None]
    labels = ids.roll(-1, dims=1)
    of_second = slice(first, first + second)
    packed = score(ids, labels, docs, positions)[:, of_second]
    beside_another = score(other_first, labels, docs, positions)[:, of_second]
    alone = score(ids[:, of_second], labels[:, of_second], docs[:, of_second], positions[:, of_second])
    if not packed.isfinite().all():
        raise DataError(f"{model_path}: the model's log-probabilities are not finite; its weights are broken")
    difference = float((packed - alone).abs().max())
    if not torch.equal(packed, beside_another) or difference > _TOLERANCE[dtype]:
        raise GrpoError(
            f"a document's log-probabilities depend on the document before it in the pack, or differ by "
            f"{difference:.3g} nats from the document alone: attention or positions cross document boundaries"
        )
