"""`prepare_data` as the flow calls it: files in, shards and counts out, or one message that says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_lib.config import RunConfig, resolve
from grpo_lib.errors import DataError
from grpo_lib.stages import prepare_data
from grpo_lib.stages.run_paths import RunPaths

HELDOUT = {"prompt": ["1+1="], "answer": ["2"]}
LONG = "1" * 99 + "+1="


def config(folder: Path, train: dict[str, Any], *overrides: str) -> RunConfig:
    for name, columns in (("train", train), ("heldout", HELDOUT)):
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    files = [f"data.{name}_path={folder / name}.parquet" for name in ("train", "heldout")]
    return resolve("embedded_addition", ["data.source=parquet", *files, *overrides])


def sums(count: int, *more: str) -> dict[str, Any]:
    prompts = [f"{x}+2=" for x in range(count)] + list(more)
    return {"prompt": prompts, "answer": ["2"] * len(prompts)}


def run(config: RunConfig, folder: Path) -> prepare_data.PreparedData:
    return prepare_data.run(config, RunPaths(run_id="GRPOFlow/1", run=folder / "run", store=str(folder / "store")))


def test_prompts_that_are_too_long_are_counted_and_the_rest_is_used(tmp_path: Path) -> None:
    prepared = run(config(tmp_path, sums(5, LONG, LONG), "loop.prompts_per_step=5"), tmp_path)
    train = prepared.manifest.splits["train"]
    assert (train.rows_read, train.num_prompts, train.drops) == (7, 5, {"prompt_too_long": 2})
    assert prepared.packing.num_samples == 5 * 16


@pytest.mark.parametrize(
    ("train", "message"),
    [
        # TRL 1.16 ends such a run after no step at all, with exit code 0.
        (
            sums(4, LONG),
            r"4 training prompts are left after filtering .*'prompt_too_long': 1.*loop\.prompts_per_step \(5\)",
        ),
        (sums(0, LONG), r"none of the 1 train rows is usable: 1 prompt_too_long .*raise data\.max_prompt_tokens"),
        ({"question": ["1+2="], "answer": ["3"]}, r"train\.parquet: no column 'prompt'; columns present: 'question'"),
        ({"prompt": pa.array([], pa.string()), "answer": pa.array([], pa.string())}, r"train\.parquet has no rows"),
    ],
    ids=["too few", "all dropped", "missing column", "empty"],
)
def test_unusable_files_end_with_the_numbers_and_leave_no_dataset(
    tmp_path: Path, train: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        run(config(tmp_path, train, "loop.prompts_per_step=5"), tmp_path)
    assert not (tmp_path / "run").exists()
