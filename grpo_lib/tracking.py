"""Metrics on disk and, when enabled, in Weights & Biases."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_lib.data.files import append_json_line, storage_errors
from grpo_lib.errors import DataError

_SETTING = "storage.root"


class MetricsFile:
    """One JSON line per step, on disk when `append` returns; numbers that were not observed are null.

    Raises:
        StorageError: the file cannot be written; so do the methods.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with storage_errors(path, setting=_SETTING):
            path.parent.mkdir(parents=True, exist_ok=True)

    def append(self, row: Mapping[str, float | int | bool]) -> None:
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in row.items()
        }
        append_json_line(self.path, finite, setting=_SETTING)

    def rows(self) -> list[dict[str, Any]]:
        return list(read_metrics(self.path))

    def write_parquet(self) -> Path:
        """The same rows as one Parquet table beside the JSON lines; every metric is a float64 column."""
        rows = self.rows()
        names = list(dict.fromkeys(name for row in rows for name in row))
        columns = {name: pa.array([row.get(name) for row in rows]) for name in names}
        target = self.path.with_suffix(".parquet")
        with storage_errors(target, setting=_SETTING):
            pq.write_table(pa.table(columns), target)
        return target


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a metrics file in step order.

    Raises:
        DataError: a line is not JSON, which a crash in the middle of a write can leave behind.
    """
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{path}, line {number} is not JSON ({error}); delete that line") from error


class WandbTracker:
    """Logs every step to a wandb run; `WANDB_MODE=offline` works without a network.

    Args:
        run_id: Also the wandb run's id, so that a resumed run continues it.
    """

    def __init__(self, *, project: str, run_id: str, config: Mapping[str, Any], directory: Path) -> None:
        import wandb  # 1.5 s of import that a run without it does not pay

        directory.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=project, id=run_id, name=run_id, resume="allow", config=dict(config), dir=str(directory)
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()
