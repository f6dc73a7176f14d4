"""Parquet files of tables, and the hash of what a table says."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_lib.storage.tables import table_digest, write_table


def table(**changes: list[object]) -> pa.Table:
    columns = {
        "name": ["a", "", None, "ßß"],
        "ids": [[1, 2], [], [3], [4, 5, 6]],
        "logprobs": [[-0.0, -1.5], [], [-3.0e38], [-1e-45, -2.0, -3.0]],
        "reward": [0.0, 1.0, 0.5, -0.0],
        "usable": [True, False, True, True],
        "time_s": [1.0, 2.0, 3.0, 4.0],
    }
    kinds = {
        "ids": pa.list_(pa.field("item", pa.int32(), nullable=False)),
        "logprobs": pa.list_(pa.field("item", pa.float32(), nullable=False)),
    }
    return pa.table({name: pa.array(values, kinds.get(name)) for name, values in {**columns, **changes}.items()})


def test_round_trip_with_the_hash_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "table"
    found = write_table(table(), path)
    assert found == hashlib.sha256(path.read_bytes()).hexdigest()
    read = pq.read_table(path)
    assert read.equals(table())
    assert table_digest(read) == table_digest(table())
    assert write_table(table(), tmp_path / "again") == found


def test_every_kind_of_column_keeps_its_encoding(tmp_path: Path) -> None:
    """Ids and log-probabilities, nearly all bytes of a run, without a dictionary that would be built in vain."""
    rng = np.random.default_rng(0)
    many = pa.table(
        {
            "ids": pa.array([rng.integers(0, 2**17, 50_000, np.int32)], pa.list_(pa.int32())),
            "logprobs": pa.array([rng.random(50_000, np.float32)], pa.list_(pa.float32())),
            "text": ["word " * 10_000],
        }
    )
    write_table(many, tmp_path / "table")
    group = pq.ParquetFile(tmp_path / "table").metadata.row_group(0)
    columns = {(column := group.column(i)).path_in_schema.partition(".")[0]: column for i in range(group.num_columns)}
    assert (columns["ids"].compression, columns["logprobs"].compression) == ("LZ4", "UNCOMPRESSED")
    assert "BYTE_STREAM_SPLIT" in columns["ids"].encodings
    assert not any("DICTIONARY" in encoding for name in ("ids", "logprobs") for encoding in columns[name].encodings)
    assert columns["ids"].total_compressed_size < 0.7 * 4 * 50_000
    assert columns["text"].total_compressed_size < 5_000


def test_digest_is_of_the_content() -> None:
    whole = table()
    digest = table_digest(whole)
    assert table_digest(pa.concat_tables([whole.slice(0, 1), whole.slice(1, 3)])) == digest
    padded = pa.concat_tables([whole, whole, whole])
    assert table_digest(padded.slice(4, 4)) == digest, "a slice shares its buffers with what is around it"
    assert table_digest(whole.replace_schema_metadata({"x": "y"})) == digest
    assert table_digest(whole.select(["usable", "ids", "time_s", "name", "reward", "logprobs"])) == digest
    later = whole.set_column(5, "time_s", pa.array([9.0] * 4))
    assert table_digest(later, leave_out=["time_s"]) == table_digest(whole, leave_out=["time_s"]) != digest


@pytest.mark.parametrize(
    "changes",
    [
        {"name": ["a", None, "", "ßß"]},
        {"name": ["", "a", None, "ßß"]},
        {"ids": [[1], [2], [3], [4, 5, 6]]},
        {"ids": [[1, 2], [], [3], [4, 5, 7]]},
        {"logprobs": [[0.0, -1.5], [], [-3.0e38], [-1e-45, -2.0, -3.0]]},
        {"reward": [0.0, 1.0, 0.5, 0.0]},
        {"usable": [True, False, True, False]},
        {"more": [1, 2, 3, 4]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_digest_notices_every_change(changes: dict[str, list[object]]) -> None:
    assert table_digest(table(**changes)) != table_digest(table())


def test_a_table_without_rows(tmp_path: Path) -> None:
    empty = table().slice(0, 0)
    write_table(empty, tmp_path / "table")
    assert table_digest(pq.read_table(tmp_path / "table")) == table_digest(empty) != table_digest(table())
