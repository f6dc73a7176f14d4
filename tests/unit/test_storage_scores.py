"""Scores come back bit for bit, whatever they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from grpo_lib.errors import StorageError
from grpo_lib.storage.local import LocalStore
from grpo_lib.storage.scores import read_scores, write_scores


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def test_scores_come_back_bit_for_bit_and_in_order(store: LocalStore) -> None:
    random = np.random.default_rng(0)
    scores = {f"eval.v3.prompt-{i}/{i % 2}": random.normal(size=i % 5).astype(np.float32) for i in range(50)}
    scores["extremes"] = np.array([np.nan, -np.inf, np.inf, -0.0, 1e-45], np.float32)
    found = read_scores(store, write_scores(store, scores))
    assert list(found) == list(scores)
    for sample_id, values in scores.items():
        assert found[sample_id].dtype == np.float32
        assert found[sample_id].tobytes() == values.tobytes()


def test_no_sample_is_a_table_too(store: LocalStore) -> None:
    assert read_scores(store, write_scores(store, {})) == {}


@pytest.mark.parametrize("values", [np.zeros(3), np.zeros((1, 3), np.float32)])
def test_other_arrays_are_refused_by_name(store: LocalStore, values: np.ndarray) -> None:
    with pytest.raises(ValueError, match="scores of a/0 are"):
        write_scores(store, {"a/0": values})


def test_another_table_is_not_taken_for_scores(store: LocalStore) -> None:
    ref = store.put_table(pa.table({"sample_id": ["a"], "logprobs": [[0.5]]}))
    with pytest.raises(StorageError, match="is not a table of scores"):
        read_scores(store, ref)


def test_a_damaged_file_is_noticed(store: LocalStore) -> None:
    ref = write_scores(store, {"a/0": np.zeros(4, np.float32)})
    path = store.get(ref)
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(StorageError, match="damaged"):
        read_scores(store, ref)
