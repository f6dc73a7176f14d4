"""Where a run keeps its files."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from grpo_lib.config import RunConfig
from grpo_lib.data.files import scratches_of, storage_errors
from grpo_lib.storage.locations import is_remote, open_store
from grpo_lib.storage.mirror import RunMirror
from grpo_lib.storage.refs import ArtifactStore

RECORD = "run.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPaths:
    """The places of one run; runs of the same `storage.root` or `storage.store` share a store."""

    run_id: str  # e.g. "GRPOFlow/123"
    run: Path
    store: str  # folder or s3://bucket/prefix

    @staticmethod
    def of(config: RunConfig, run_id: str) -> RunPaths:
        """Absolute paths of run `run_id` under `storage.root`; nothing is created."""
        root = Path(os.path.abspath(config.storage.root))
        return RunPaths(run_id=run_id, run=root / run_id, store=store_location(config))

    def open_store(self) -> ArtifactStore:
        """Where rollouts and other artifacts go."""
        return open_store(self.store)

    def mirror(self, store: ArtifactStore | None = None) -> RunMirror:
        """How this run's files reach steps on other machines; does nothing where the store is a folder.

        Args:
            store: `open_store`'s, where it is open already.
        """
        return RunMirror(store or self.open_store(), run_id=self.run_id, folder=self.run)

    @property
    def record(self) -> Path:
        """What the run is: id, configuration, origin. See `stored_run`."""
        return self.run / RECORD

    @property
    def running(self) -> Path:
        """Who works on the run now. See `attempts`."""
        return self.run / "running.json"

    @property
    def attempts(self) -> Path:
        """One JSON line when an attempt begins, continues and ends."""
        return self.run / "attempts.jsonl"

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
    def step_tables(self) -> tuple[Path, ...]:
        """What grows by lines with every step; a checkpoint vouches for the lines of its steps."""
        return (self.metrics, self.certificates, self.rollout_index)

    @property
    def lost(self) -> Path:
        """Lines of steps after the checkpoint that a later attempt continued from. See `lost_steps`."""
        return self.run / "lost"

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
    def after_training(self) -> tuple[Path, ...]:
        """What is written once all steps are done, by `fit` and the steps after it."""
        return (self.metrics.with_suffix(".parquet"), self.export, self.evaluation, self.parity)

    @property
    def tracking(self) -> Path:
        return self.run / "tracking"


def store_location(config: RunConfig) -> str:
    """`storage.store`, a folder of it as an absolute path; without it the folder `store` of `storage.root`."""
    location = config.storage.store
    if location is not None and is_remote(location):
        return location.rstrip("/")
    return os.path.abspath(location or Path(config.storage.root) / "store")


def clear(*paths: Path) -> None:
    """Remove files and folders that an earlier attempt of a step left, so that a retried step starts from its inputs.

    Raises:
        StorageError: something cannot be removed.
    """
    for path in paths:
        with storage_errors(path, setting="storage.root"):
            for left in (path, *scratches_of(path)):
                if left.is_dir():
                    shutil.rmtree(left)
                else:
                    left.unlink(missing_ok=True)
