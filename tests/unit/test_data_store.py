"""Rows → prompts → shards → the same prompts; what is dropped is counted, what is damaged is refused."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_lib.config import DataConfig, VerifierConfig
from grpo_lib.data.chat import load_tokenizer
from grpo_lib.data.models import resolve_model_path
from grpo_lib.data.prepare import PreparedPrompts, prepare_prompts
from grpo_lib.data.prompts import Split
from grpo_lib.data.store import MANIFEST, DatasetManifest, read_manifest, read_prompts, write_dataset
from grpo_lib.errors import DataError, StorageError
from grpo_lib.verifiers.registry import get_verifier

TRAIN = [
    {"prompt": "1+1=", "answer": "2"},
    {"prompt": "1+1=", "answer": "2"},  # a duplicate is another prompt
    {"prompt": "  ", "answer": "2"},
    {"prompt": "2+2=", "answer": ""},
    {"prompt": "2+2=", "answer": "four"},
    {"prompt": " 5+5= ", "answer": "10"},  # held out
    {"prompt": "1000000+1000000=", "answer": "2000000"},
    {"prompt": "3+4=", "answer": "7"},
]
HELDOUT = [{"prompt": "5+5=", "answer": "10"}]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(resolve_model_path("builtin:tiny_qwen3"))


def prepare(folder: Path, tokenizer, train: list[dict], heldout: list[dict] = HELDOUT, **fields) -> PreparedPrompts:
    paths = {}
    for split, rows in (("train", train), ("heldout", heldout)):
        path = folder / f"{split}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        paths[f"{split}_path"] = str(path)
    config = DataConfig(source="jsonl", max_prompt_tokens=10, **paths, **fields)
    accepts = get_verifier("integer").accepts_answer
    return prepare_prompts(config, VerifierConfig(), tokenizer, accepts_answer=accepts)


@pytest.fixture
def prepared(tmp_path: Path, tokenizer) -> PreparedPrompts:
    return prepare(tmp_path, tokenizer, TRAIN)


def test_every_row_is_a_prompt_or_counted(prepared: PreparedPrompts) -> None:
    assert [(prompt.prompt_id, prompt.answer) for prompt in prepared.train] == [
        ("jsonl-train-000000", "2"),
        ("jsonl-train-000001", "2"),
        ("jsonl-train-000007", "7"),
    ]
    assert prepared.drops == {
        "train": {
            "empty_prompt": 1, "empty_answer": 1, "unjudgeable_answer": 1, "heldout_overlap": 1, "prompt_too_long": 1,
        },
        "heldout": {},
    }  # fmt: skip
    assert prepared.rows_read["train"] == len(prepared.train) + sum(prepared.drops["train"].values())
    assert prepared.train[2].text == "<|user|>3+4=<|assistant|>"
    assert prepared.train[2].verifier == "integer"


def test_limit_is_inclusive(tmp_path: Path, tokenizer) -> None:
    """`max_prompt_tokens` 10 holds two special tokens and eight bytes."""
    prepared = prepare(tmp_path, tokenizer, [{"prompt": "x" * n, "answer": "1"} for n in (8, 9)])
    assert [len(prompt.token_ids) for prompt in prepared.train] == [10]


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (
            [{"prompt": "x" * 99, "answer": "1"}] * 3 + [{"prompt": "", "answer": "1"}],
            r"none of the 4 train rows is usable: 3 prompt_too_long, 1 empty_prompt \(data.max_prompt_tokens is 10\); "
            "raise data.max_prompt_tokens",
        ),
        ([{"prompt": "1+1=", "answer": "two"}], "1 unjudgeable_answer; choose another verifier.name"),
        (HELDOUT, "1 heldout_overlap; give other files"),
    ],
)
def test_all_dropped_is_an_error_with_counts(tmp_path: Path, tokenizer, train: list[dict], message: str) -> None:
    with pytest.raises(DataError, match=message):
        prepare(tmp_path, tokenizer, train)


def test_round_trip_over_several_shards(tmp_path: Path, prepared: PreparedPrompts) -> None:
    manifest = write_dataset(tmp_path / "data", prepared, rows_per_shard=2)
    assert [(shard.file, shard.num_rows) for shard in manifest.shards] == [
        ("train-00000.parquet", 2), ("train-00001.parquet", 1), ("heldout-00000.parquet", 1),
    ]  # fmt: skip
    assert read_prompts(tmp_path / "data", Split.TRAIN) == prepared.train
    assert read_prompts(tmp_path / "data", Split.HELDOUT) == prepared.heldout
    assert read_manifest(tmp_path / "data") == manifest
    tokens = manifest.splits["train"].tokens
    assert (tokens.total, tokens.min, tokens.max, tokens.mean) == (18, 6, 6, 6.0)
    assert manifest.splits["train"].drops == prepared.drops["train"]
    assert DatasetManifest.from_dict(json.loads(json.dumps(manifest.to_dict()))) == manifest


def test_hash_is_of_content_and_not_of_place_or_encoding(tmp_path: Path, tokenizer, prepared: PreparedPrompts) -> None:
    (tmp_path / "elsewhere").mkdir()
    again = prepare(tmp_path / "elsewhere", tokenizer, TRAIN)
    first = write_dataset(tmp_path / "a", prepared)
    second = write_dataset(tmp_path / "b", again, rows_per_shard=1)
    assert first.dataset_sha256 == second.dataset_sha256
    changes = [
        replace(prepared, train=(replace(prepared.train[0], answer="3"), *prepared.train[1:])),
        replace(prepared, train=prepared.train[::-1]),
        replace(prepared, train=prepared.heldout, heldout=prepared.train),
        replace(prepared, template="raw"),
        replace(prepared, tokenizer_sha256="0" * 64),
    ]
    hashes = {write_dataset(tmp_path / f"c{i}", changed).dataset_sha256 for i, changed in enumerate(changes)}
    assert len(hashes | {first.dataset_sha256}) == 1 + len(changes)


def test_damage_is_noticed(tmp_path: Path, prepared: PreparedPrompts) -> None:
    whole = tmp_path / "whole"
    write_dataset(whole, prepared)

    def damaged(name: str) -> Path:
        return Path(shutil.copytree(whole, tmp_path / name))

    folder = damaged("flipped")
    shard = folder / "train-00000.parquet"
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(DataError, match=r"train-00000\.parquet was changed: sha256 is"):
        read_prompts(folder, Split.TRAIN)
    assert read_prompts(folder, Split.HELDOUT) == prepared.heldout

    folder = damaged("gone")
    (folder / "train-00000.parquet").unlink()
    with pytest.raises(DataError, match=r"train-00000\.parquet is missing"):
        read_prompts(folder, Split.TRAIN)

    folder = damaged("edited")
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["splits"]["train"]["content_sha256"] = "0" * 64
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="was changed: dataset_sha256 is"):
        read_manifest(folder)
    for text, message in (("{", "not JSON"), ("[]", "expected an object"), ('{"format": 9}', "format 9"),
                          ('{"format": 1}', "damaged")):  # fmt: skip
        (folder / MANIFEST).write_text(text)
        with pytest.raises(DataError, match=message):
            read_manifest(folder)
    (folder / MANIFEST).unlink()
    with pytest.raises(DataError, match=r"no complete dataset: manifest\.json, which is written last, is missing"):
        read_prompts(folder, Split.TRAIN)


def test_shard_swapped_with_its_hash_is_noticed(tmp_path: Path, prepared: PreparedPrompts) -> None:
    """A changed shard whose file hash was updated too still contradicts the content hash."""
    folder = tmp_path / "data"
    write_dataset(folder, prepared)
    path = folder / "train-00000.parquet"
    table = pq.read_table(path)
    answers = pa.array(["9"] * table.num_rows)
    pq.write_table(table.set_column(3, table.schema.field("answer"), answers), path)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["shards"][0]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="the train shards hold 3 prompts with content"):
        read_prompts(folder, Split.TRAIN)


def test_interrupted_rewrite_leaves_nothing_to_trust(
    tmp_path: Path, prepared: PreparedPrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    write_dataset(folder, prepared)

    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full_disk)
    with pytest.raises(StorageError, match=r"bytes free on that disk; remove old runs, or point storage\.root"):
        write_dataset(folder, prepared)
    with pytest.raises(DataError, match="no complete dataset"):
        read_prompts(folder, Split.TRAIN)
    assert not list(folder.glob(".*"))
