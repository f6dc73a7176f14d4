"""Micro-batches between processes: one numpy array per field instead of one torch tensor per field and micro-batch.

Ray moves numpy arrays without copying them and pickles torch tensors one by one; a step has a hundred of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from grpo_lib.types import PackedBatch


class BatchParcel:
    """Equally shaped micro-batches; unpickles as the ``tuple[PackedBatch, ...]`` itself."""

    def __init__(self, micro_batches: Sequence[PackedBatch]) -> None:
        self._micro_batches = tuple(micro_batches)

    def __reduce__(self) -> tuple[object, ...]:
        batches = self._micro_batches
        names = tuple(batches[0].tensors()) if batches else ()
        fields = {name: np.stack([batch.tensors()[name].numpy() for batch in batches]) for name in names}
        return _unpack, (fields, tuple(batch.sample_ids for batch in batches))


def _unpack(fields: dict[str, np.ndarray], sample_ids: tuple[tuple[tuple[str, ...], ...], ...]) -> object:
    # Copied: what Ray maps into a process is read-only.
    tensors = {name: torch.from_numpy(stacked.copy()).unbind() for name, stacked in fields.items()}
    return tuple(
        PackedBatch(sample_ids=ids, **{name: rows[index] for name, rows in tensors.items()})
        for index, ids in enumerate(sample_ids)
    )
