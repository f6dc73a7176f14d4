"""The log-probabilities that one scorer gave to stored samples, as a Parquet table, exact to the bit."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from grpo_lib.errors import StorageError
from grpo_lib.storage.refs import ArtifactStore, StoreRef

FORMAT = "scores 1"
SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("logprobs", pa.list_(pa.field("item", pa.float32(), nullable=False)), nullable=False),
    ]
)


def write_scores(store: ArtifactStore, scores: Mapping[str, np.ndarray]) -> StoreRef:
    """Store the scores of one scorer.

    Args:
        scores: Sample id → [R] float32, in the order they are read again.

    Raises:
        StorageError: the store cannot take them.
        ValueError: an array is not [R] float32.
    """
    for sample_id, values in scores.items():
        if values.dtype != np.float32 or values.ndim != 1:
            raise ValueError(f"scores of {sample_id} are {values.dtype} of shape {values.shape}, not [R] float32")
    columns = {"sample_id": list(scores), "logprobs": list(scores.values())}
    return store.put_table(pa.Table.from_pydict(columns, schema=SCHEMA.with_metadata({"format": FORMAT})))


def read_scores(store: ArtifactStore, ref: StoreRef) -> dict[str, np.ndarray]:
    """What `write_scores` was given.

    Raises:
        StorageError: the file is missing or damaged, or is no table of scores.
    """
    path = store.get(ref, verified=True)
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise StorageError(f"artifact {path} is not readable Parquet: {error}") from error
    if (table.schema.metadata or {}).get(b"format") != FORMAT.encode() or not table.schema.equals(SCHEMA):
        raise StorageError(f"artifact {path} is not a table of scores of format {FORMAT!r}")
    values = [row.as_py() for row in table.column("logprobs")]
    arrays = (np.asarray(row, np.float32) for row in values)
    return dict(zip(table.column("sample_id").to_pylist(), arrays, strict=True))
