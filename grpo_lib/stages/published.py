"""`fit` on a machine that has nothing of the run yet: its inputs and its last checkpoint come from the run's store.

Nothing is copied where the store is a folder: every step then sees the run's own.
"""

from __future__ import annotations

import logging
from pathlib import Path

from grpo_lib.config import LoopConfig
from grpo_lib.errors import StorageError
from grpo_lib.stages.checkpoints import checkpoints_of, superseded
from grpo_lib.stages.run_paths import RunPaths

log = logging.getLogger(__name__)


def fetch_for_training(paths: RunPaths, *, from_shards: bool) -> None:
    """Bring what `fit` reads, and the newest published checkpoint with the rows of its steps.

    A checkpoint that cannot be brought whole is skipped with a warning that says why.

    Raises:
        StorageError: an input was never published, or is damaged.
    """
    mirror = paths.mirror()
    mirror.fetch(paths.data, *([paths.shards] if from_shards else []))
    here = checkpoints_of(paths)
    for checkpoint in reversed(mirror.published(paths.checkpoints)):
        if here and here[-1].name >= checkpoint.name:
            return  # an attempt on this machine got further than it could publish; so did its rows
        try:
            mirror.fetch(checkpoint, *paths.step_tables)
            return
        except StorageError as error:
            log.warning("checkpoint %s cannot be fetched: %s; trying the one before", checkpoint.name, error)


def publish_checkpoint(paths: RunPaths, checkpoint: Path, *, loop: LoopConfig) -> None:
    """Make a checkpoint available with the rows of its steps, rows first; those not kept any more are withdrawn.

    Raises:
        StorageError: the store cannot take it; those published before stay.
    """
    mirror = paths.mirror()
    mirror.publish(*paths.step_tables, checkpoint)
    for old in superseded(mirror.published(paths.checkpoints), loop):
        mirror.withdraw(old)


def publish_result(paths: RunPaths) -> None:
    """Make available what the steps after `fit` read.

    Raises:
        StorageError: the store cannot take it.
    """
    paths.mirror().publish(*paths.step_tables, paths.metrics.with_suffix(".parquet"), paths.export)
