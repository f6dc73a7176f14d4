"""Row sources: generated sums, Parquet and JSONL files. A row is text and answer; no tokens yet."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_lib.config import DataConfig
from grpo_lib.errors import DataError

# The split is a property of the task and not of a run: runs with other seeds are measured on the same held-out sums,
# and the shipped tiny model has seen none of the default ones.
ADDITION_SEED = 1


class Split(StrEnum):
    """What a row is for."""

    TRAIN = "train"
    HELDOUT = "heldout"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """One row as it was read or generated; `row` is its position in the source, blank lines of a file included."""

    prompt: str
    answer: str
    dataset: str
    split: Split
    row: int

    @property
    def prompt_id(self) -> str:
        """Unique by occurrence: a duplicated row is another prompt with its own group (compare Search-R1 88)."""
        return f"{self.dataset}-{self.split}-{self.row:06d}"


def load_rows(config: DataConfig) -> tuple[tuple[PromptRow, ...], tuple[PromptRow, ...]]:
    """(training rows, held-out rows) of the configured source.

    Raises:
        DataError: a file is missing, empty or malformed, or the space of sums is too small.
    """
    if config.source == "addition":
        return addition_rows(config)
    splits = (
        ("data.train_path", config.train_path, Split.TRAIN),
        ("data.heldout_path", config.heldout_path, Split.HELDOUT),
    )
    missing = [key for key, path, _ in splits if path is None]
    if missing:
        raise DataError(f"data.source={config.source} needs {' and '.join(missing)}; set them to local files")
    train, heldout = (
        file_rows(Path(path), config, key=key, split=split) for key, path, split in splits if path is not None
    )
    return train, heldout


def addition_rows(
    config: DataConfig, *, seed: int = ADDITION_SEED
) -> tuple[tuple[PromptRow, ...], tuple[PromptRow, ...]]:
    """Distinct sums with x in [0, max_x) and y in [0, max_y): (training, held-out), disjoint.

    Written ``x+y=``, or in words after `num_shots` solved ones, which are the same for all rows and in neither split.
    Held-out sums are drawn first and shots next, so that `num_train` changes neither.
    """
    space, wanted = config.max_x * config.max_y, config.num_train + config.num_heldout + config.num_shots
    if wanted > space:
        shots = f" + data.num_shots ({config.num_shots})" if config.num_shots else ""
        raise DataError(
            f"data.num_train ({config.num_train}) + data.num_heldout ({config.num_heldout}){shots} = {wanted} exceeds "
            f"the {space} sums of data.max_x ({config.max_x}) x data.max_y ({config.max_y}); ask for fewer or raise "
            "max_x"
        )
    # `random()` is the one method whose sequence Python promises to keep for a seed.
    generator = random.Random(seed)
    drawn: dict[int, None] = {}
    while len(drawn) < wanted:
        drawn[int(generator.random() * space)] = None
    sums = [divmod(index, config.max_y) for index in drawn]
    first_train = config.num_heldout + config.num_shots
    shots = "".join(f"{_question(x, y)} {x + y}\n\n" for x, y in sums[config.num_heldout : first_train])

    def rows(pairs: Sequence[tuple[int, int]], split: Split) -> tuple[PromptRow, ...]:
        return tuple(
            PromptRow(
                prompt=shots + _question(x, y) if shots else f"{x}+{y}=",
                answer=str(x + y),
                dataset="addition",
                split=split,
                row=row,
            )
            for row, (x, y) in enumerate(pairs)
        )

    return rows(sums[first_train:], Split.TRAIN), rows(sums[: config.num_heldout], Split.HELDOUT)


def _question(x: int, y: int) -> str:
    """Ends without a space: in most vocabularies the space belongs to the answer's first token."""
    return f"Question: What is {x} + {y}?\nAnswer:"


def file_rows(path: Path, config: DataConfig, *, key: str, split: Split) -> tuple[PromptRow, ...]:
    """Rows of a local Parquet or JSONL file through the configured columns.

    Text is taken as it is; integers are accepted as answers; null becomes empty text, which preparation counts.

    Args:
        key: Config key that named the file, for messages.
    """
    if not path.is_file():
        raise DataError(f"{key}: {path} is not a file; give the path of a {config.source} file")
    read = _parquet_values if config.source == "parquet" else _jsonl_values
    rows = tuple(
        PromptRow(
            prompt=_text(prompt, f"{path}, {place}", config.prompt_field, allow_int=False),
            answer=_text(answer, f"{path}, {place}", config.answer_field, allow_int=True),
            dataset=config.source,  # not the file's name: a moved or renamed file is the same data
            split=split,
            row=row,
        )
        for row, place, prompt, answer in read(path, config)
    )
    if not rows:
        raise DataError(f"{key}: {path} has no rows")
    return rows


def _text(value: object, place: str, column: str, *, allow_int: bool) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            raise DataError(f"{place}: column {column!r} holds half a surrogate pair, which is no text: {value!r:.60}")
        return value
    if allow_int and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    expected = "text or an integer" if allow_int else "text"
    raise DataError(f"{place}: column {column!r} holds {type(value).__name__} {value!r:.60}; expected {expected}")


def _missing_column(place: str, columns: Sequence[str], config: DataConfig) -> DataError | None:
    keys = {"data.prompt_field": config.prompt_field, "data.answer_field": config.answer_field}
    missing = {key: column for key, column in keys.items() if column not in columns}
    if not missing:
        return None
    names = " and ".join(f"{column!r}" for column in missing.values())
    return DataError(
        f"{place}: no column {names}; columns present: {', '.join(map(repr, columns)) or 'none'}; "
        f"set {' and '.join(missing)}"
    )


def _parquet_values(path: Path, config: DataConfig) -> Iterator[tuple[int, str, object, object]]:
    try:
        with pq.ParquetFile(path) as file:
            error = _missing_column(str(path), file.schema_arrow.names, config)
            if error is not None:
                raise error
            row = 0
            for batch in file.iter_batches(columns=[config.prompt_field, config.answer_field]):
                prompts, answers = batch.column(config.prompt_field), batch.column(config.answer_field)
                for prompt, answer in zip(prompts.to_pylist(), answers.to_pylist(), strict=True):
                    yield row, f"row {row}", prompt, answer
                    row += 1
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}") from error


def _jsonl_values(path: Path, config: DataConfig) -> Iterator[tuple[int, str, object, object]]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            for row, line in enumerate(file):
                if not line.strip():
                    continue
                place = f"line {row + 1}"
                try:
                    record = json.loads(line)
                except json.JSONDecodeError as error:
                    raise DataError(f"{path}, {place}: not JSON: {error}") from error
                if not isinstance(record, dict):
                    raise DataError(f"{path}, {place}: expected a JSON object, found {type(record).__name__}")
                missing = _missing_column(f"{path}, {place}", list(record), config)
                if missing is not None:
                    raise missing
                yield row, place, record[config.prompt_field], record[config.answer_field]
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error
