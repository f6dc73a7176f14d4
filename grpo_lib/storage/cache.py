"""Downloaded artifacts on this machine: bounded, and removed in the order of their last use."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from grpo_lib.data.files import fsync, new_file, storage_errors

_SETTING = "XDG_CACHE_HOME"
_LIMIT_BYTES = 20 << 30
_MAX_DISK_SHARE = 0.25  # of the cache's disk
_IN_USE_S = 600.0  # a path given out so recently may not have been opened yet


class ArtifactCache:
    """Files named by their key, shared by all stores and processes of a user.

    Args:
        limit_bytes: Where least recently used files begin to go; at most a quarter of the disk.
    """

    def __init__(self, folder: Path, *, limit_bytes: int = _LIMIT_BYTES) -> None:
        self._folder, self._limit_bytes = folder, limit_bytes

    def find(self, key: str, size_bytes: int) -> Path | None:
        """A file of that name and size, which counts as used now."""
        path = self._path(key)
        try:
            if path.stat().st_size != size_bytes:
                return None
            os.utime(path)
        except FileNotFoundError:
            return None
        return path

    def scratch(self, needed_bytes: int) -> AbstractContextManager[Path]:
        """A name for a new file, gone afterwards unless it was admitted; refuses at once what cannot fit."""
        return new_file(self._folder / "incoming", setting=_SETTING, needed_bytes=needed_bytes)

    def admit(self, scratch: Path, key: str) -> Path:
        """Give a whole file, whose hash is its key, its place, and make room for it."""
        path = self._path(key)
        with storage_errors(path, setting=_SETTING):
            path.parent.mkdir(parents=True, exist_ok=True)
            fsync(scratch)  # or a machine that fails may leave the name and the size without the bytes
            scratch.chmod(0o444)
            os.replace(scratch, path)
        self._shrink()
        return path

    def drop(self, key: str) -> None:
        """Forget a file, which was found to be damaged."""
        self._path(key).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / key

    def _shrink(self) -> None:
        files = []
        for path in self._folder.glob("??/*"):
            try:
                files.append((path.stat(), path))
            except FileNotFoundError:  # another process shrinks too
                continue
        total = sum(state.st_size for state, _ in files)
        limit = min(self._limit_bytes, int(_MAX_DISK_SHARE * shutil.disk_usage(self._folder).total))
        unused_since = time.time() - _IN_USE_S
        for state, path in sorted(files, key=lambda file: file[0].st_mtime):
            if total <= limit or state.st_mtime > unused_since:
                return
            path.unlink(missing_ok=True)
            total -= state.st_size


def default_cache(environment: Mapping[str, str]) -> Path:
    """``~/.cache/grpo/artifacts``, or under ``XDG_CACHE_HOME``."""
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "grpo" / "artifacts"
