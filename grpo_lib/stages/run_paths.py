"""Where a run keeps its files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from grpo_lib.config import RunConfig


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
    def tracking(self) -> Path:
        return self.run / "tracking"
