"""`fit` on a machine that has nothing of the run yet: its inputs and its last checkpoint come from the run's store.

Nothing is copied where the store is a folder: every step then sees the run's own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from grpo_lib.config import LoopConfig
from grpo_lib.errors import ArtifactLost, DataError
from grpo_lib.stages.checkpoints import (
    ResumePoint,
    newest_or_none_made,
    none_is_usable,
    search,
    superseded,
    verified,
)
from grpo_lib.stages.run_paths import RunPaths
from grpo_lib.storage.mirror import PUBLISHED, RUNS

log = logging.getLogger(__name__)


def fetch_for_training(paths: RunPaths, *, from_shards: bool) -> None:
    """Bring what `fit` reads: the run's record, its inputs, and the newest checkpoint with the rows of its steps.

    Raises:
        DataError: there are checkpoints, and none can be used.
        StorageError: an input was never published, or is damaged; or the store or the disk fails.
    """
    mirror = paths.mirror()
    if not paths.record.is_file() and paths.record in mirror.published():
        mirror.fetch(paths.record)  # whose checkpoints the run may use, and under which configuration
    mirror.fetch(paths.data, *([paths.shards] if from_shards else []))
    newest_fetched(paths, tables=paths.step_tables)


def newest_fetched(paths: RunPaths, *, tables: Sequence[Path] = ()) -> ResumePoint | None:
    """The newest checkpoint that is whole, here or published; it is here afterwards. None where none was ever made.

    A damaged one is skipped with a warning that says why. Where the store fails, all may be well with the checkpoint:
    that is raised, for to go on from an older one would do its steps again.

    Args:
        tables: What is brought first, if the checkpoint is not here: it is of no use without.

    Raises:
        DataError: there are checkpoints, and none can be used.
        StorageError: the store or the disk fails.
    """
    mirror = paths.mirror()
    published = mirror.published(paths.checkpoints)
    if not published:
        return newest_or_none_made(paths)
    here, damages = search(paths)  # this machine may have got further than it could publish; so did its rows
    for checkpoint in reversed(published):
        if here is not None and here.path.name >= checkpoint.name:
            return here
        try:
            mirror.fetch(*tables, checkpoint)
            return verified(checkpoint)
        except (ArtifactLost, DataError) as error:
            log.warning("checkpoint %s cannot be fetched: %s; trying the one before", checkpoint.name, error)
            damages.append(f"published {checkpoint.name}: {error}")
    if here is None:
        place = f"{paths.store}/{RUNS}{paths.run_id}/{PUBLISHED}{paths.checkpoints.name}/"
        raise none_is_usable(paths, damages, published_at=place)
    return here


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
