"""Rows of steps that no checkpoint remembers are moved aside, so that a resumed run has one row per step.

``<run>/lost/``   ``metrics-<hash>.jsonl`` … with such rows, as they were; and checkpoints that were damaged
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_lib.data.files import fsync, storage_errors, whole_file
from grpo_lib.errors import DataError
from grpo_lib.stages.checkpoints import CheckpointState, checkpoints_of
from grpo_lib.stages.run_paths import RunPaths

log = logging.getLogger(__name__)

_SETTING = "storage.root"
_HASH_CHARS = 16


def truncate_to(paths: RunPaths, state: CheckpointState | None) -> None:
    """Leave a run's tables as they were at a checkpoint, before the first step after it is run again.

    Later rows, and what a crash left of a line that was being written, move to files below `paths.lost` first; the
    table is replaced after that. A crash in between leaves all rows in the table and a copy beside it, under a name
    that the next try uses again. Checkpoints of later steps, damaged or they would have been taken, move there too;
    those that are published are withdrawn, or they would count as newer than what the run writes from now on.

    Args:
        state: The checkpoint that the run continues from; None if it starts again, so that all rows are lost.

    Raises:
        DataError: a row of a step that the checkpoint remembers is missing or damaged.
        StorageError: a file cannot be written.
    """
    steps_done, version = (state.steps_done, state.policy_version) if state is not None else (0, -1)
    for table in (paths.metrics, paths.rollout_index):
        kept = _split(table, paths.lost, lambda row: row["step"] <= steps_done)
        steps = [row["step"] for row in kept]
        if steps != list(range(1, steps_done + 1)):
            raise DataError(
                f"{table} does not have one row for each of the {steps_done} steps that the checkpoint remembers, but "
                f"{len(steps)} rows that end with steps {steps[-3:]}; it was changed after it was written"
            )
    _split(paths.certificates, paths.lost, lambda row: row["policy_version"] <= version)
    mirror = paths.mirror()
    for checkpoint in mirror.published(paths.checkpoints):
        if _is_later(checkpoint, state):
            mirror.withdraw(checkpoint)
            log.warning("checkpoint %s is not used and no longer published", checkpoint.name)
    for checkpoint in checkpoints_of(paths):
        if _is_later(checkpoint, state):
            _set_aside(checkpoint, paths.lost)


def _is_later(checkpoint: Path, state: CheckpointState | None) -> bool:
    return state is None or checkpoint.name > f"step-{state.steps_done:06d}"


def _split(table: Path, lost: Path, is_kept: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Move rows that are not kept, and everything after the first of them, out of a table; returns those that are."""
    if not table.exists():
        return []
    lines = table.read_bytes().splitlines(keepends=True)
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        row = _parsed(line, table, number=number, is_last=number == len(lines))
        if row is None or not is_kept(row):
            break
        rows.append(row)
    rest = b"".join(lines[len(rows) :])
    if rest:
        target = lost / f"{table.stem}-{hashlib.sha256(rest).hexdigest()[:_HASH_CHARS]}.jsonl"
        with whole_file(target, setting=_SETTING) as scratch:
            scratch.write_bytes(rest)
        with whole_file(table, setting=_SETTING) as scratch:
            scratch.write_bytes(b"".join(lines[: len(rows)]))
        log.warning("%d lines of %s are of a lost attempt and are in %s now", len(lines) - len(rows), table, target)
    return rows


def _parsed(line: bytes, table: Path, *, number: int, is_last: bool) -> dict[str, Any] | None:
    """A row; None for a last line that a crash cut off, be it only at its end: the next row would join it."""
    try:
        return json.loads(line) if line.endswith(b"\n") else None
    except ValueError as error:
        if is_last:
            return None
        raise DataError(f"{table}, line {number} is not JSON ({error}); it was changed after it was written") from error


def _set_aside(checkpoint: Path, lost: Path) -> None:
    with storage_errors(lost, setting=_SETTING):
        lost.mkdir(parents=True, exist_ok=True)
        target = lost / checkpoint.name
        number = 1
        while target.exists():
            number += 1
            target = lost / f"{checkpoint.name}-{number}"
        checkpoint.rename(target)
        fsync(lost)
        fsync(checkpoint.parent)
    log.warning("checkpoint %s is not used and is in %s now; remove it when nobody needs it", checkpoint, target)
