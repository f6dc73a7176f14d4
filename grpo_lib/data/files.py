"""Files that are either whole or absent, with their sha256; and files that grow by whole lines."""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_lib.errors import StorageError

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


@contextmanager
def new_file(folder: Path, *, setting: str, needed_bytes: int) -> Iterator[Path]:
    """A name in `folder` that no other process uses; what is still there afterwards is removed.

    Raises:
        StorageError: the file cannot fit, which is refused at once, or cannot be written.
    """
    path = folder / uuid.uuid4().hex
    with storage_errors(path, setting=setting, needed_bytes=needed_bytes):
        folder.mkdir(parents=True, exist_ok=True)
        if needed_bytes > free_bytes(folder):
            raise StorageError(no_room(path, "the disk is full", setting=setting, needed_bytes=needed_bytes))
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)


@contextmanager
def whole_file(target: Path, *, setting: str) -> Iterator[Path]:
    """A scratch path beside `target` that becomes `target` when the block ends, and vanishes when it raises.

    The bytes are on the disk before the name is, so a reader or a crash never meets a part of the file.

    Args:
        setting: Config key of the folder, for messages.

    Raises:
        StorageError: no room, no permission, or the disk failed.
    """
    scratch = _scratch_of(target)
    with storage_errors(target, setting=setting):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield scratch
            fsync(scratch)
            os.replace(scratch, target)
            fsync(target.parent)
        finally:
            scratch.unlink(missing_ok=True)


@contextmanager
def whole_folder(target: Path, *, setting: str) -> Iterator[Path]:
    """An empty scratch folder beside `target` that becomes `target` when the block ends, and vanishes when it raises.

    All files are on the disk before the name is. Errors of the block are its own.

    Args:
        setting: Config key of the folder, for messages.

    Raises:
        StorageError: there is a `target` with something in it, no room, no permission, or the disk failed.
    """
    scratch = _scratch_of(target)
    with storage_errors(target, setting=setting):
        scratch.mkdir(parents=True)
    try:
        yield scratch
        with storage_errors(target, setting=setting):
            for path in [*scratch.rglob("*"), scratch]:
                fsync(path)
            scratch.rename(target)
            fsync(target.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def scratches_of(target: Path) -> list[Path]:
    """What `whole_file` and `whole_folder` of a killed process left beside `target`."""
    return list(target.parent.glob(f".{glob.escape(target.name)}.*.part"))


@contextmanager
def storage_errors(path: Path, *, setting: str, needed_bytes: int | None = None) -> Iterator[None]:
    """Turn an `OSError` of the block into a `StorageError` that says what to do."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _NO_ROOM:
            raise StorageError(no_room(path, reason, setting=setting, needed_bytes=needed_bytes)) from error
        if error.errno in _FORBIDDEN:
            advice = f"make the folder writable for this user, or point {setting} elsewhere"
        else:
            advice = f"check the folder and its disk, or point {setting} elsewhere"
        raise StorageError(f"cannot write {path}: {reason}; {advice}") from error


def append_json_line(path: Path, row: Mapping[str, Any], *, setting: str) -> None:
    """Add one line of JSON to a file, which is made with its folder where there is none; written when it returns.

    Raises:
        StorageError: the file cannot be written.
    """
    with storage_errors(path, setting=setting):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _scratch_of(target: Path) -> Path:
    return target.parent / f".{target.name}.{uuid.uuid4().hex}.part"


def no_room(path: Path, reason: str, *, setting: str, needed_bytes: int | None = None) -> str:
    """Message for a full disk, with the bytes that are needed and free."""
    needed = "" if needed_bytes is None else f"{needed_bytes:,} bytes needed, "
    return (
        f"cannot write {path}: {reason}: {needed}{free_bytes(path):,} bytes free on that disk; "
        f"remove old runs, or point {setting} to a disk with room"
    )


def free_bytes(path: Path) -> int:
    """Bytes this user may still write on the disk of `path`, which need not exist yet."""
    folder = path
    while not folder.is_dir():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def fsync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
