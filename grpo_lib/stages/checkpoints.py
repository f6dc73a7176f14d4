"""A run's checkpoints: written behind the training, complete or absent, verified before they are used, and pruned.

``<run>/checkpoints/step-<n>/``   the trainer's files, see `trainers.checkpoint_folder`
  ``loop.json``                   what else the run needs to go on: `CheckpointState`
  ``manifest.json``               size and sha256 of every other file; written last

A checkpoint is put together in a ``.partial-…`` folder and renamed. It becomes visible only when everything that its
steps left is on the disk: rollouts first, then the steps' rows, then the checkpoint. So whoever continues from it finds
all rows of its steps, and knows that later ones are of an attempt that was lost (`lost_steps`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_lib.config import LoopConfig
from grpo_lib.data.files import fsync, sha256_of, storage_errors, whole_folder
from grpo_lib.errors import DataError, GrpoError, StorageError
from grpo_lib.interfaces import TrainerGroup
from grpo_lib.stages.run_paths import RunPaths
from grpo_lib.types import WrittenFile

log = logging.getLogger(__name__)

_SETTING = "storage.root"
_LOOP, _MANIFEST = "loop.json", "manifest.json"
_HIDDEN = ".partial-"  # not yet complete, or about to be removed
_CLOSE_S = 30.0  # how long a run that has failed waits for a checkpoint under way
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)  # other errors of a disk are no proof of damage
_READERS = 4  # threads that hash a checkpoint's files


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """What a run needs besides its trainer's tensors to go on; content of ``loop.json``."""

    run_id: str  # of the run that wrote it
    steps_done: int
    empty_steps: int  # in a row, without a trainable token
    policy_version: int
    prompts: Mapping[str, int]  # of `PromptStream.state`
    tracker_run_id: str | None = None  # the wandb run that a resumed run continues


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """A verified checkpoint."""

    path: Path
    state: CheckpointState


@dataclass(slots=True, kw_only=True)
class _Pending:
    """The checkpoint under way: first the ranks write, then the driver makes it visible."""

    state: CheckpointState
    partial: Path
    sealing: Future[None] | None = None


class CheckpointWriter:
    """Writes the checkpoints of one attempt of a run, one at a time. For one thread.

    What an earlier attempt left unfinished is removed first.

    Args:
        on_visible: Called with each new checkpoint, in a thread of its own, before older ones are removed.

    Raises:
        StorageError: the folder of checkpoints cannot be written.
    """

    def __init__(
        self,
        paths: RunPaths,
        trainer: TrainerGroup,
        *,
        loop: LoopConfig,
        on_visible: Callable[[Path], None] | None = None,
    ) -> None:
        self._paths, self._trainer, self._loop, self._on_visible = paths, trainer, loop, on_visible
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: _Pending | None = None
        self._steps_recorded = 0
        with storage_errors(paths.checkpoints, setting=_SETTING):
            for left in paths.checkpoints.glob(f"{_HIDDEN}*"):
                shutil.rmtree(left)

    def begin(self, state: CheckpointState) -> None:
        """Copy the trainer's state, which may change again when this returns; waits for the checkpoint before it.

        Raises:
            RankFailure: a rank could not take its part, or write that of the checkpoint before; the cause says why.
            StorageError: the folder cannot be made, or the checkpoint before could not be written.
        """
        self.finish()
        self._pending = _Pending(state=state, partial=_hidden(self._target(state)))
        with self._dropped_on_failure(self._pending):
            with storage_errors(self._target(state), setting=_SETTING):
                self._pending.partial.mkdir(parents=True)
            self._trainer.begin_save(self._pending.partial)  # not a storage error: a deadline is an OSError too

    def recorded(self, step: int) -> None:
        """The step's rows are stored, so its checkpoint may become visible. Raises as `finish`."""
        self._steps_recorded = step
        self.poll()

    def poll(self) -> None:
        """Go on with the checkpoint under way as far as is possible without waiting. Raises as `finish`."""
        self._advance(wait=False)

    def finish(self) -> None:
        """Wait until the checkpoint under way is visible, if there is one, and those not kept any more are gone.

        Raises:
            RankFailure: a rank could not write its part; the cause says why.
            StorageError: the rest could not be written. Earlier checkpoints are untouched in either case.
        """
        self._advance(wait=True)

    def close(self) -> None:
        """End. After a failure the checkpoint under way is still worth some seconds; if it fails too, that is logged
        and not raised over the first failure."""
        try:
            if self._pending is not None and self._pending.state.steps_done <= self._steps_recorded:
                self._advance(wait=True, deadline_s=_CLOSE_S)
        except (GrpoError, OSError) as error:
            log.error("the checkpoint under way is not kept: %s", error)
        finally:
            self._thread.shutdown(wait=True)
            if self._pending is not None:
                self._drop(self._pending)

    def _advance(self, *, wait: bool, deadline_s: float | None = None) -> None:
        pending = self._pending
        if pending is None or (not wait and pending.state.steps_done > self._steps_recorded):
            return
        assert pending.state.steps_done <= self._steps_recorded, f"the rows of {pending.partial} are not recorded"
        with self._dropped_on_failure(pending):
            if pending.sealing is None:
                files = self._trainer.written(wait=wait, deadline_s=deadline_s)
                if files is None:
                    return
                pending.sealing = self._thread.submit(self._complete, pending, files)
            if wait or pending.sealing.done():
                pending.sealing.result()
                self._pending = None

    @contextmanager
    def _dropped_on_failure(self, pending: _Pending) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._drop(pending)
            raise

    def _drop(self, pending: _Pending) -> None:
        """Forget a checkpoint and give its room back, which a full disk needs; one that is being completed at this very
        moment is left alone, for it must not become visible with files missing."""
        self._pending = None
        if pending.sealing is None or pending.sealing.done():
            shutil.rmtree(pending.partial, ignore_errors=True)

    def _complete(self, pending: _Pending, files: Sequence[WrittenFile]) -> None:
        """In the writer's thread."""
        target = self._target(pending.state)
        with storage_errors(target, setting=_SETTING):
            for table in self._paths.step_tables:
                if table.exists():
                    fsync(table)
            loop_file = pending.partial / _LOOP
            loop_file.write_text(json.dumps(asdict(pending.state)) + "\n")
            _write_manifest(pending.partial, [*files, _written(loop_file)])
            fsync(pending.partial)
            pending.partial.rename(target)
            fsync(target.parent)
        if self._on_visible is not None:
            self._on_visible(target)
        with storage_errors(self._paths.checkpoints, setting=_SETTING):
            for path in superseded(checkpoints_of(self._paths), self._loop):
                gone = path.rename(_hidden(path))  # a removal that is interrupted must not leave half a checkpoint
                shutil.rmtree(gone)

    def _target(self, state: CheckpointState) -> Path:
        return self._paths.checkpoints / _name(state.steps_done)


def save_once(trainer: TrainerGroup, target: Path) -> None:
    """Write a trainer's state and wait for it; `target` is complete, with a manifest, or absent.

    Raises:
        RankFailure: a rank could not write its part; the cause says why.
        StorageError: the rest could not be written.
    """
    with whole_folder(target, setting=_SETTING) as scratch:
        trainer.begin_save(scratch)
        files = trainer.written(wait=True)
        assert files is not None, "it was waited for"
        with storage_errors(target, setting=_SETTING):
            _write_manifest(scratch, files)


def checkpoints_of(paths: RunPaths) -> list[Path]:
    """Visible checkpoints of a run, oldest first, whether or not they are still whole."""
    return sorted(paths.checkpoints.glob("step-*"))


def newest_complete(paths: RunPaths, *, at_most: int | None = None) -> ResumePoint | None:
    """The newest checkpoint whose files are all there and unchanged; None when there is none.

    A damaged one is skipped with a warning that says which file differs and how.

    Args:
        at_most: Steps done in the newest that may be taken; any number when absent.

    Raises:
        StorageError: the disk or its rights keep a file from being read, which says nothing about the checkpoint.
    """
    return search(paths, at_most=at_most)[0]


def search(paths: RunPaths, *, at_most: int | None = None) -> tuple[ResumePoint | None, list[str]]:
    """As `newest_complete`, with what is wrong with each that was skipped."""
    damages: list[str] = []
    for path in reversed(checkpoints_of(paths)):
        if at_most is not None and path.name > _name(at_most):
            continue
        try:
            return verified(path), damages
        except DataError as error:
            log.warning("%s; it is not used, an older checkpoint is", error)
            damages.append(str(error))
    return None, damages


def newest_or_none_made(paths: RunPaths) -> ResumePoint | None:
    """The newest complete checkpoint; None only where there is no checkpoint at all.

    Raises:
        DataError: there are checkpoints, and all of them are damaged.
        StorageError: as `newest_complete`.
    """
    point, damages = search(paths)
    if point is None and damages:
        raise none_is_usable(paths, damages)
    return point


def none_is_usable(paths: RunPaths, damages: Sequence[str], *, published_at: str | None = None) -> DataError:
    """Work would be lost without a word if a run began anew because all that it saved is damaged.

    Args:
        published_at: Where the store has some of them.
    """
    places = " and ".join([*([str(paths.checkpoints)] if checkpoints_of(paths) else []), *filter(None, [published_at])])
    return DataError(
        f"run {paths.run_id} has checkpoints and none can be used: {'; '.join(damages)}. Bring one back from a copy; "
        f"or, to begin again at the first step, move {places} elsewhere"
    )


def verified(path: Path) -> ResumePoint:
    """A checkpoint, after all of its files were hashed again.

    Raises:
        DataError: a file is missing or is not what the manifest says; the message names it.
        StorageError: a file is there and cannot be read.
    """
    manifest = _read(path, _MANIFEST)
    files = manifest.get("files")
    if not isinstance(files, dict) or _digest(files) != manifest.get("sha256") or _LOOP not in files:
        raise DataError(f"checkpoint {path} is damaged: {_MANIFEST} was changed after it was written")
    with ThreadPoolExecutor(max_workers=_READERS) as readers:
        reasons = readers.map(lambda name: _damage(path, WrittenFile(name=name, **files[name])), files)
        damages = [reason for reason in reasons if reason is not None]
    if damages:
        raise DataError(f"checkpoint {path} is damaged: {'; '.join(damages)}")
    try:
        state = CheckpointState(**_read(path, _LOOP))
    except TypeError as error:
        raise DataError(f"checkpoint {path} was written by another version: {_LOOP}: {error}") from error
    return ResumePoint(path=path, state=state)


def superseded(checkpoints: Sequence[Path], loop: LoopConfig) -> list[Path]:
    """Those that are neither among the newest nor of a step that is kept for good."""
    old = checkpoints[: -loop.keep_checkpoints]
    return [path for path in old if not (loop.keep_every and _steps_done(path) % loop.keep_every == 0)]


def _write_manifest(folder: Path, files: Sequence[WrittenFile]) -> None:
    facts = {file.name: {"size_bytes": file.size_bytes, "sha256": file.sha256} for file in files}
    manifest = folder / _MANIFEST
    manifest.write_text(json.dumps({"files": facts, "sha256": _digest(facts)}, indent=2) + "\n")
    fsync(manifest)


def _written(file: Path) -> WrittenFile:
    fsync(file)
    return WrittenFile(name=file.name, size_bytes=file.stat().st_size, sha256=sha256_of(file))


def _damage(path: Path, file: WrittenFile) -> str | None:
    """How a file differs from what was written; None when it does not."""
    try:
        size = (path / file.name).stat().st_size
        if size != file.size_bytes:
            return f"{file.name} has {size:,} of {file.size_bytes:,} bytes"
        found = sha256_of(path / file.name)
    except _ABSENT as error:
        return f"{file.name} cannot be read: {error.strerror}"
    except OSError as error:
        raise _unreadable(path / file.name, error) from error
    return None if found == file.sha256 else f"{file.name} has other bytes: sha256 {found:.12}… not {file.sha256:.12}…"


def _read(path: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads((path / name).read_text())
    except _ABSENT as error:
        raise DataError(f"checkpoint {path} is damaged: {name} cannot be read: {error.strerror}") from error
    except OSError as error:
        raise _unreadable(path / name, error) from error
    except ValueError as error:
        raise DataError(f"checkpoint {path} is damaged: {name} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"checkpoint {path} is damaged: {name} holds a {type(content).__name__}, not an object")
    return content


def _unreadable(file: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot read {file}: {error.strerror}; check the disk and this user's rights, or move {file.parent} elsewhere "
        "to do without this checkpoint"
    )


def _digest(files: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _name(steps_done: int) -> str:
    return f"step-{steps_done:06d}"


def _steps_done(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _hidden(target: Path) -> Path:
    """A name beside `target` that no other process uses: a rank of a killed attempt may still be writing to its own."""
    return target.with_name(f"{_HIDDEN}{target.name}-{uuid.uuid4().hex[:8]}")
