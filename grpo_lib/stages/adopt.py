"""Metaflow's `resume`: a run with an id of its own goes on from what its origin left, in a folder of its own.

What the resumed step reads is copied, never linked, so nothing that the new run does can reach the origin's files.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from grpo_lib.config import RunConfig
from grpo_lib.data.files import storage_errors
from grpo_lib.stages.checkpoints import newest_or_none_made
from grpo_lib.stages.published import newest_fetched
from grpo_lib.stages.run_paths import RunPaths, clear
from grpo_lib.stages.stored_run import write_run

log = logging.getLogger(__name__)

_SETTING = "storage.root"


def adopt(
    paths: RunPaths,
    *,
    run_id: str,
    origins: Sequence[str],
    step: str,
    config: RunConfig,
    config_hash: str,
    lineage: Mapping[str, object],
) -> RunPaths:
    """The run's own folder, with copies of what `step` reads of the nearest origin that has a folder.

    A second attempt of the step finds the folder made and leaves it alone; `run.json` is written last.

    Args:
        paths: Of the run that finished the step before.
        run_id: Of the run that goes on, e.g. "GRPOFlow/124".
        origins: Ids of the runs that it continues, nearest first.
        step: The first that is run again.

    Raises:
        DataError: the origin has checkpoints, and none can be used.
        StorageError: something cannot be copied.
    """
    own = _sibling(paths, run_id)
    if _has_record(own):
        return own
    source = next((found for origin in origins if _has_record(found := _sibling(paths, origin))), paths)
    wanted = _read_by(step, source)
    clear(own.run)  # what an attempt that was killed while it copied left
    if source.open_store().is_remote:
        _fetch(source, own, wanted, with_checkpoint=step in _AFTER_SHARDS)
    else:
        checkpoint = newest_or_none_made(source) if step in _AFTER_SHARDS else None
        if checkpoint is not None:
            wanted = [*(path for path in wanted if path != source.shards), checkpoint.path]
        for path in wanted:
            _copy(path, own.run / path.relative_to(source.run))
    write_run(own, run_id=run_id, config=config, config_hash=config_hash, lineage=lineage, origins=origins)
    log.info("run %s goes on from run %s in %s", run_id, source.run_id, own.run)
    return own


_AFTER_SHARDS = (
    "fit",
    "rollouts",
    "evaluate",
    "parity_report",
    "end",
)  # they read a checkpoint of training, if there is one


def _read_by(step: str, source: RunPaths) -> list[Path]:
    """What a step, and those after it, read of the steps before it; `fit` also of its own earlier attempt."""
    trained = [source.data, *source.step_tables]
    finished = [*trained, source.metrics.with_suffix(".parquet"), source.export]
    return {
        "prepare_data": [],
        "shard_model": [source.data],
        "sync_weights": [source.data, source.shards],
        "fit": [source.shards, *trained],
        "rollouts": trained,  # of `ParityFlow`: a `fit` that needs no shards
        "evaluate": finished,
        "parity_report": [*finished, source.evaluation],
        "end": [*finished, source.evaluation, source.parity],
    }[step]


def _sibling(paths: RunPaths, run_id: str) -> RunPaths:
    """The paths of another run of the same flow, under the same root."""
    return replace(paths, run_id=run_id, run=paths.run.with_name(run_id.rpartition("/")[2]))


def _has_record(paths: RunPaths) -> bool:
    return paths.record.is_file() or paths.record in paths.mirror().published()


def _copy(source: Path, target: Path) -> None:
    """Copy a file or a folder; links become files. What the origin does not have is not needed."""
    with storage_errors(target, setting=_SETTING):
        if source.is_dir():
            shutil.copytree(source, target)
        elif source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def _fetch(source: RunPaths, own: RunPaths, wanted: Sequence[Path], *, with_checkpoint: bool) -> None:
    """Bring what the origin published straight into the own folder, and publish it again under the own id."""
    origin = replace(own, run_id=source.run_id)
    published = set(origin.mirror().published())
    here = [path for path in (own.run / path.relative_to(source.run) for path in wanted) if path in published]
    origin.mirror().fetch(*here)
    if with_checkpoint and (point := newest_fetched(origin)) is not None:
        here.append(point.path)
    own.mirror().publish(*here)
