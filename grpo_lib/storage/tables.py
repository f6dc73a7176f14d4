"""Tables as Parquet files: how they are encoded, and a hash of what they say rather than of how it is encoded."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from grpo_lib.data.files import fsync, sha256_of


def write_table(table: pa.Table, path: Path) -> str:
    """Write a Parquet file, flush it to the disk, and return its sha256. Equal tables give equal bytes within one
    pyarrow version.

    Token ids, log-probabilities and texts are most of the bytes, and a disk is faster than zstd. Ids are worth no
    dictionary: with their bytes sorted by significance (BYTE_STREAM_SPLIT), lz4 halves them in half the time of zstd
    without. Log-probabilities hardly shrink and stay as they are. Texts take half zstd's time with snappy.

    Raises:
        OSError: the file cannot be written.
    """
    ids, floats = (_leaves(table.schema, lists_of=kind) for kind in (pa.int32(), pa.float32()))
    others = [name for name in _leaves(table.schema) if name not in (*ids, *floats)]
    compression: Any = {  # pyarrow's stubs know only one for all columns
        **dict.fromkeys(ids, "lz4"),
        **dict.fromkeys(floats, "none"),
        **dict.fromkeys(others, "snappy"),
    }
    pq.write_table(
        table,
        path,
        compression=compression,
        use_dictionary=others,  # pyright: ignore[reportArgumentType]  # its stubs know only a flag
        column_encoding=dict.fromkeys(ids, "BYTE_STREAM_SPLIT"),
        write_statistics=False,  # nobody filters by them
    )
    with ThreadPoolExecutor(max_workers=1) as pool:  # the disk works while the hash is computed
        flushed = pool.submit(fsync, path)
        found = sha256_of(path)
        flushed.result()
    return found


def table_digest(table: pa.Table, *, leave_out: Collection[str] = ()) -> str:
    """sha256 over names, lengths and values of all columns but some; chunks, encoding and metadata do not matter."""
    names = sorted(name for name in table.column_names if name not in leave_out)
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        digests = pool.map(lambda name: _column_digest(table.column(name)), names)
    whole = hashlib.sha256(str(table.num_rows).encode())
    for name, digest in zip(names, digests, strict=True):
        whole.update(f"\n{name} ".encode() + digest)
    return whole.hexdigest()


def _column_digest(column: pa.ChunkedArray) -> bytes:
    digest = hashlib.sha256()
    for part in _parts(column):
        little = part.astype(part.dtype.newbyteorder("<"), copy=False)
        digest.update(np.ascontiguousarray(little).view(np.uint8).data)
    return digest.digest()


def _parts(column: pa.ChunkedArray) -> Iterator[np.ndarray]:
    """A column as plain arrays: lengths of all rows (-1 is null) and then all values, where rows have lengths."""
    if pa.types.is_list(column.type):
        yield _lengths(pc.call_function("list_value_length", [column]))
        for chunk in column.chunks:
            yield chunk.flatten().to_numpy()
    elif pa.types.is_string(column.type):
        yield _lengths(pc.call_function("binary_length", [column]))
        for chunk in column.chunks:
            if len(chunk):
                starts = np.frombuffer(chunk.buffers()[1], np.int32)[chunk.offset : chunk.offset + len(chunk) + 1]
                yield np.frombuffer(chunk.buffers()[2] or b"", np.uint8)[starts[0] : starts[-1]]
    else:
        yield column.to_numpy()


def _lengths(lengths: pa.ChunkedArray) -> np.ndarray:
    return pc.fill_null(lengths, -1).to_numpy().astype(np.int64)


def _leaves(schema: pa.Schema, *, lists_of: pa.DataType | None = None) -> list[str]:
    """Parquet's names of the columns with values; only those of lists of a type, if one is given."""
    return [
        f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name
        for field in schema
        if lists_of is None or (pa.types.is_list(field.type) and field.type.value_type == lists_of)
    ]
