"""Where a run keeps its files."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from grpo_lib.config import RunConfig
from grpo_lib.data.files import storage_errors


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPaths:
    """The folders of one run; `store` is shared by all runs under the same storage root."""

    run: Path
    store: Path

    @staticmethod
    def of(config: RunConfig, run_id: str) -> RunPaths:
        """Absolute paths of run `run_id` under `storage.root`; nothing is created."""
        root = Path(os.path.abspath(config.storage.root))
        return RunPaths(run=root / run_id, store=root / "store")

    @property
    def record(self) -> Path:
        """What the run is: id, configuration, origin. See `stored_run`."""
        return self.run / "run.json"

    @property
    def data(self) -> Path:
        return self.run / "data"

    @property
    def shards(self) -> Path:
        """The base model in the trainer's own sharding."""
        return self.run / "shards"

    @property
    def checkpoints(self) -> Path:
        return self.run / "checkpoints"

    @property
    def export(self) -> Path:
        """The trained model as a Hugging Face folder."""
        return self.run / "model"

    @property
    def metrics(self) -> Path:
        return self.run / "metrics.jsonl"

    @property
    def certificates(self) -> Path:
        return self.run / "certificates.jsonl"

    @property
    def rollout_index(self) -> Path:
        """One JSON line per step with the store reference of its rollouts."""
        return self.run / "rollouts.jsonl"

    @property
    def evaluation(self) -> Path:
        """Accuracies and the store reference of the probe rollouts."""
        return self.run / "evaluation.json"

    @property
    def parity(self) -> Path:
        """The run's own parity report."""
        return self.run / "parity.json"

    @property
    def replay(self) -> Path:
        """Dumps of the nightly gate, gone once it has compared them."""
        return self.run / "replay"

    @property
    def of_fit(self) -> tuple[Path, ...]:
        """Everything that `fit` and the steps after it write; trackers keep their own history."""
        tables = (self.metrics, self.metrics.with_suffix(".parquet"), self.certificates, self.rollout_index)
        return (*tables, self.checkpoints, self.export, self.evaluation, self.parity)

    @property
    def tracking(self) -> Path:
        return self.run / "tracking"


def clear(*paths: Path) -> None:
    """Remove files and folders that an earlier attempt of a step left, so that a retried step starts from its inputs.

    Raises:
        StorageError: something cannot be removed.
    """
    for path in paths:
        with storage_errors(path, setting="storage.root"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
