"""The store on a local or shared disk: ``root/objects/ab/ab12…``, named by sha256, read-only, whole or absent."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_lib.data.files import free_bytes, fsync, no_room, sha256_of, storage_errors
from grpo_lib.errors import StorageError
from grpo_lib.storage.refs import StoreKind, StoreRef

_SETTING = "storage.root"
_CHUNK_BYTES = 1 << 20


class LocalStore:
    """`refs.ArtifactStore` in a folder that may be shared by many runs and processes.

    An artifact is written under a scratch name, flushed, and renamed to its key, so that neither a crash nor a second
    writer of the same bytes can leave a part of it behind.
    """

    def __init__(self, root: Path) -> None:
        self._root = Path(os.path.abspath(root))

    def put_file(self, path: Path) -> StoreRef:
        """Store a copy of a file, see `refs.ArtifactStore`."""
        try:
            with path.open("rb") as source:
                size = os.fstat(source.fileno()).st_size
                with self._scratch(needed_bytes=size) as scratch:
                    key = _copy_and_hash(source, scratch)
                    return self._admit(scratch, key, StoreKind.FILE)
        except OSError as error:
            raise StorageError(f"{path} cannot be read to be stored: {error.strerror}") from error

    def put_table(self, table: pa.Table) -> StoreRef:
        """Store a table as zstd Parquet; equal tables give equal bytes within one pyarrow version."""
        with self._scratch(needed_bytes=table.nbytes) as scratch:
            pq.write_table(table, scratch, compression="zstd")
            return self._admit(scratch, sha256_of(scratch), StoreKind.TABLE)

    def get(self, ref: StoreRef) -> Path:
        """The artifact's file, see `refs.ArtifactStore`."""
        path = self._path(ref.key)
        try:
            size = path.stat().st_size
        except FileNotFoundError as error:
            raise StorageError(
                f"artifact {ref.key} is not in the store {self._root}; it was removed, or {_SETTING} differs from the "
                "run that stored it"
            ) from error
        if size != ref.size_bytes:
            raise StorageError(f"artifact {path} was damaged after storing: {size:,} of {ref.size_bytes:,} bytes")
        return path

    def verify(self, ref: StoreRef) -> None:
        """Hash the artifact again, see `refs.ArtifactStore`."""
        path = self.get(ref)
        found = sha256_of(path)
        if found != ref.key:
            raise StorageError(f"artifact {path} was damaged after storing: its sha256 is now {found}")

    def _path(self, key: str) -> Path:
        return self._root / "objects" / key[:2] / key

    @contextmanager
    def _scratch(self, *, needed_bytes: int) -> Iterator[Path]:
        """A scratch name that is gone afterwards; refuses at once what cannot fit."""
        scratch = self._root / "incoming" / uuid.uuid4().hex
        with storage_errors(scratch, setting=_SETTING, needed_bytes=needed_bytes):
            scratch.parent.mkdir(parents=True, exist_ok=True)
            if needed_bytes > free_bytes(scratch.parent):
                raise StorageError(no_room(scratch, "the disk is full", setting=_SETTING, needed_bytes=needed_bytes))
            try:
                yield scratch
            finally:
                scratch.unlink(missing_ok=True)

    def _admit(self, scratch: Path, key: str, kind: StoreKind) -> StoreRef:
        """Give the flushed scratch file its final name."""
        ref = StoreRef(key=key, size_bytes=scratch.stat().st_size, kind=kind)
        target = self._path(key)
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch.chmod(0o444)
        fsync(scratch)
        os.replace(scratch, target)  # over an equal or a damaged file of that name
        fsync(target.parent)
        return ref


def _copy_and_hash(source: BinaryIO, target: Path) -> str:
    """Copy a file and hash what was copied: the source may change in between, the copy may not."""
    digest = hashlib.sha256()
    with target.open("xb") as copy:
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
            copy.write(chunk)
    return digest.hexdigest()
