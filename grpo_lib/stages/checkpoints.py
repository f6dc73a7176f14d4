"""A run's checkpoints: complete or absent, verified before they are used, and pruned."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from grpo_lib.config import LoopConfig
from grpo_lib.data.files import fsync, sha256_of, storage_errors
from grpo_lib.errors import DataError, StorageError
from grpo_lib.interfaces import TrainerGroup
from grpo_lib.stages.run_paths import RunPaths

log = logging.getLogger(__name__)

_SETTING = "storage.root"
_LOOP, _MANIFEST = "loop.json", "manifest.json"
_PARTIAL = ".partial-"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """What a run needs besides its trainer's tensors to go on; content of ``loop.json``."""

    run_id: str  # of the run that wrote it: nobody resumes from a stranger's checkpoint
    steps_done: int
    empty_steps: int  # in a row, without a trainable token
    policy_version: int
    prompts: Mapping[str, int]  # of `PromptStream.state`
    tracker_run_id: str | None = None  # the wandb run that a resumed run continues
    monitors: Mapping[str, Any] = field(default_factory=dict)  # plain state of tripwires, by name


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """A verified checkpoint."""

    path: Path
    state: CheckpointState


class CheckpointWriter:
    """Writes the checkpoints of one attempt of a run, one at a time.

    What an earlier attempt left half-written is removed first.

    Raises:
        StorageError: the folder of checkpoints cannot be written; so do the methods.
    """

    def __init__(self, paths: RunPaths, trainer: TrainerGroup, *, loop: LoopConfig) -> None:
        self._paths, self._trainer, self._loop = paths, trainer, loop
        self._state: CheckpointState | None = None  # of the checkpoint being written
        with storage_errors(paths.checkpoints, setting=_SETTING):
            for partial in paths.checkpoints.glob(f"{_PARTIAL}*"):
                shutil.rmtree(partial)

    def begin(self, state: CheckpointState) -> None:
        """Take a copy of the trainer's state; it may change again when this returns. Waits for the one before.

        Raises:
            RankFailure: a rank could not write its part; the cause says why.
            StorageError: the rest could not be written. Earlier checkpoints are untouched in either case.
        """
        self.finish()
        partial = self._partial(state)
        with storage_errors(partial, setting=_SETTING):
            partial.parent.mkdir(parents=True, exist_ok=True)
        self._trainer.save(partial)  # outside of `storage_errors`: a deadline is an OSError too
        self._state = state

    def finish(self) -> None:
        """Wait until the checkpoint under way is visible, if there is one, and remove those not kept any more.

        Raises:
            RankFailure: a rank could not write its part; the cause says why.
            StorageError: the rest could not be written. Earlier checkpoints are untouched in either case.
        """
        state, self._state = self._state, None
        if state is None:
            return
        partial = self._partial(state)
        with storage_errors(partial, setting=_SETTING):
            (partial / _LOOP).write_text(json.dumps(asdict(state)))
            files = {
                file.relative_to(partial).as_posix(): {"size_bytes": file.stat().st_size, "sha256": sha256_of(file)}
                for file in sorted(partial.rglob("*"))
                if file.is_file()
            }
            (partial / _MANIFEST).write_text(json.dumps({"files": files, "sha256": _digest(files)}, indent=1))
            partial.rename(self._paths.checkpoints / _name(state.steps_done))
            fsync(self._paths.checkpoints)
            for old in checkpoints_of(self._paths)[: -self._loop.keep_checkpoints]:
                shutil.rmtree(old)

    def close(self) -> None:
        """End without waiting for what is being written; it never becomes visible."""

    def _partial(self, state: CheckpointState) -> Path:
        return self._paths.checkpoints / f"{_PARTIAL}{_name(state.steps_done)}"


def checkpoints_of(paths: RunPaths) -> list[Path]:
    """Visible checkpoints of a run, oldest first, whether or not they are still whole."""
    return sorted(paths.checkpoints.glob("step-*"))


def newest_complete(paths: RunPaths, *, at_most: int | None = None) -> ResumePoint | None:
    """The newest checkpoint whose files are all there and unchanged; None when there is none.

    A damaged one is skipped with a warning that says which file differs and how.

    Args:
        at_most: Steps done in the newest that may be taken; any number when absent.
    """
    for path in reversed(checkpoints_of(paths)):
        if at_most is not None and path.name > _name(at_most):
            continue
        try:
            return verified(path)
        except (DataError, StorageError) as error:
            log.warning("checkpoint %s is damaged and is not used: %s; trying the one before", path, error)
    return None


def verified(path: Path) -> ResumePoint:
    """A checkpoint, after all of its files were hashed again.

    Raises:
        DataError: a file is missing, has another size or other bytes than the manifest says; the message names it.
    """
    manifest = _read(path / _MANIFEST)
    files = manifest.get("files", {})
    if _digest(files) != manifest.get("sha256"):
        raise DataError(f"{_MANIFEST} was changed after it was written")
    for name, expected in files.items():
        _check_file(path / name, name, expected)
    return ResumePoint(path=path, state=CheckpointState(**_read(path / _LOOP)))


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise DataError(f"{file.name} is missing") from error
    except ValueError as error:
        raise DataError(f"{file.name} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{file.name} must hold a JSON object, not a {type(content).__name__}")
    return content


def _check_file(file: Path, name: str, expected: Mapping[str, Any]) -> None:
    try:
        size = file.stat().st_size
    except FileNotFoundError as error:
        raise DataError(f"{name} is missing") from error
    if size != expected["size_bytes"]:
        raise DataError(f"{name} has {size:,} bytes, {expected['size_bytes']:,} were written")
    found = sha256_of(file)
    if found != expected["sha256"]:
        raise DataError(f"{name} was changed after it was written: its sha256 is {found}, not {expected['sha256']}")


def _digest(files: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _name(steps_done: int) -> str:
    return f"step-{steps_done:06d}"
