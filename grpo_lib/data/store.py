"""Prompt shards on disk: Parquet files and a manifest that is written last and trusted only after its hashes agree."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from grpo_lib.data.files import sha256_of, storage_errors, whole_file
from grpo_lib.data.prepare import PreparedPrompts
from grpo_lib.data.prompts import Split
from grpo_lib.errors import DataError
from grpo_lib.types import Prompt

MANIFEST = "manifest.json"
FORMAT = 1
ROWS_PER_SHARD = 50_000
_SETTING = "storage.root"
_SCHEMA = pa.schema(
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("token_ids", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False),
        pa.field("answer", pa.string(), nullable=False),
        pa.field("dataset", pa.string(), nullable=False),
        pa.field("verifier", pa.string(), nullable=False),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptShard:
    """One Parquet file; `file` is its name in the dataset's folder."""

    file: str
    split: str
    num_rows: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Prompt lengths in tokens."""

    total: int
    min: int
    mean: float
    p95: float
    max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitSummary:
    """What became of the rows of one split."""

    rows_read: int
    num_prompts: int
    drops: Mapping[str, int]  # by `prepare.DropReason`
    tokens: TokenCounts
    content_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetManifest:
    """Everything about a prepared dataset but its rows.

    `dataset_sha256` covers prompts in order, template and tokenizer, and neither paths nor the Parquet encoding: the
    same data prepared elsewhere has the same hash.
    """

    dataset_sha256: str
    template: str
    tokenizer_sha256: str
    splits: Mapping[str, SplitSummary]
    shards: tuple[PromptShard, ...]
    format: int = FORMAT

    def to_dict(self) -> dict[str, object]:
        """Plain values, for JSON and run artifacts."""
        return asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, object]) -> DatasetManifest:
        """The inverse of `to_dict`.

        Raises:
            DataError: fields are missing or of another format.
        """
        fields = dict(values)
        if fields.get("format") != FORMAT:
            raise DataError(f"dataset manifest has format {fields.get('format')!r}; this version reads {FORMAT}")
        try:
            splits = {
                name: SplitSummary(**{**summary, "tokens": TokenCounts(**summary["tokens"])})
                for name, summary in fields.pop("splits").items()  # type: ignore[attr-defined]
            }
            shards = tuple(PromptShard(**shard) for shard in fields.pop("shards"))  # type: ignore[attr-defined]
            return DatasetManifest(**fields, splits=splits, shards=shards)  # type: ignore[arg-type]
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"dataset manifest is damaged: {error!r}") from error


def write_dataset(folder: Path, prepared: PreparedPrompts, *, rows_per_shard: int = ROWS_PER_SHARD) -> DatasetManifest:
    """Write the shards of both splits, then the manifest that makes them visible.

    Raises:
        StorageError: the folder cannot be written.
    """
    with storage_errors(folder, setting=_SETTING):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST).unlink(missing_ok=True)  # from now on incomplete, whatever was here before
    shards: list[PromptShard] = []
    splits: dict[str, SplitSummary] = {}
    for split, prompts in ((Split.TRAIN, prepared.train), (Split.HELDOUT, prepared.heldout)):
        splits[split.value] = _summary(prepared, split.value, prompts)
        for number, start in enumerate(range(0, len(prompts), rows_per_shard)):
            shard = prompts[start : start + rows_per_shard]
            path = folder / f"{split}-{number:05d}.parquet"
            with whole_file(path, setting=_SETTING) as scratch:
                pq.write_table(_table(shard), scratch, compression="zstd")
            shards.append(PromptShard(file=path.name, split=split.value, num_rows=len(shard), sha256=sha256_of(path)))
    manifest = DatasetManifest(
        dataset_sha256=_dataset_sha256(prepared.template, prepared.tokenizer_sha256, splits),
        template=prepared.template,
        tokenizer_sha256=prepared.tokenizer_sha256,
        splits=splits,
        shards=tuple(shards),
    )
    with whole_file(folder / MANIFEST, setting=_SETTING) as scratch:
        scratch.write_text(json.dumps(manifest.to_dict(), indent=2) + "\n", encoding="utf-8")
    return manifest


def read_manifest(folder: Path) -> DatasetManifest:
    """The manifest of a complete dataset.

    Raises:
        DataError: there is none, or it contradicts itself.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise DataError(f"{folder} holds no complete dataset: {MANIFEST}, which is written last, is missing")
    try:
        values = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise DataError(f"{path} holds a JSON {type(values).__name__}; expected an object")
    manifest = DatasetManifest.from_dict(values)
    expected = _dataset_sha256(manifest.template, manifest.tokenizer_sha256, manifest.splits)
    if manifest.dataset_sha256 != expected:
        raise DataError(
            f"{path} was changed: dataset_sha256 is {manifest.dataset_sha256}, its contents give {expected}"
        )
    return manifest


def read_prompts(folder: Path, split: Split) -> tuple[Prompt, ...]:
    """The prompts of one split in their order, after file and content hashes were checked.

    Raises:
        DataError: a shard is missing, changed or malformed; the message names it.
    """
    manifest = read_manifest(folder)
    prompts: list[Prompt] = []
    for shard in manifest.shards:
        if shard.split == split:
            prompts += _read_shard(folder / shard.file, shard)
    summary = manifest.splits[split.value]
    found = content_sha256(prompts)
    if len(prompts) != summary.num_prompts or found != summary.content_sha256:
        raise DataError(
            f"{folder}: the {split} shards hold {len(prompts)} prompts with content {found}, but the manifest says "
            f"{summary.num_prompts} with {summary.content_sha256}; prepare the data again"
        )
    return tuple(prompts)


def content_sha256(prompts: Sequence[Prompt]) -> str:
    """Hash of prompts in order: ids, text, tokens, answers, verifiers."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps(asdict(prompt), sort_keys=True).encode())
        digest.update(b"\n")
    return digest.hexdigest()


def _dataset_sha256(template: str, tokenizer_sha256: str, splits: Mapping[str, SplitSummary]) -> str:
    contents = {name: summary.content_sha256 for name, summary in splits.items()}
    return hashlib.sha256(json.dumps([template, tokenizer_sha256, contents], sort_keys=True).encode()).hexdigest()


def _summary(prepared: PreparedPrompts, split: str, prompts: Sequence[Prompt]) -> SplitSummary:
    lengths = np.array([len(prompt.token_ids) for prompt in prompts], dtype=np.int64)
    return SplitSummary(
        rows_read=prepared.rows_read[split],
        num_prompts=len(prompts),
        drops=dict(prepared.drops[split]),
        tokens=TokenCounts(
            total=int(lengths.sum()),
            min=int(lengths.min()),
            mean=float(lengths.mean()),
            p95=float(np.quantile(lengths, 0.95)),
            max=int(lengths.max()),
        ),
        content_sha256=content_sha256(prompts),
    )


def _table(prompts: Sequence[Prompt]) -> pa.Table:
    return pa.Table.from_pydict(
        {name: [getattr(prompt, name) for prompt in prompts] for name in _SCHEMA.names}, schema=_SCHEMA
    )


def _read_shard(path: Path, shard: PromptShard) -> list[Prompt]:
    if not path.is_file():
        raise DataError(f"prompt shard {path} is missing; prepare the data again")
    found = sha256_of(path)
    if found != shard.sha256:
        raise DataError(f"prompt shard {path} was changed: sha256 is {found}, the manifest says {shard.sha256}")
    try:
        table = pq.read_table(path, schema=_SCHEMA)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"prompt shard {path} is not readable: {error}") from error
    if table.num_rows != shard.num_rows:
        raise DataError(f"prompt shard {path} has {table.num_rows} rows, the manifest says {shard.num_rows}")
    columns = [table.column(name).to_pylist() for name in _SCHEMA.names]
    rows = (dict(zip(_SCHEMA.names, values, strict=True)) for values in zip(*columns, strict=True))
    return [Prompt(**{**row, "token_ids": tuple(row["token_ids"])}) for row in rows]
