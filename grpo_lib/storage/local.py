"""The store on a local or shared disk: ``root/objects/ab/ab12…``, named by sha256, read-only, whole or absent."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from grpo_lib.data.files import fsync, new_file, sha256_of, storage_errors, whole_file
from grpo_lib.errors import ArtifactLost, StorageError
from grpo_lib.storage.refs import Stored, StoreKind, StoreRef, document_name
from grpo_lib.storage.tables import write_table

_SETTING = "storage.store"
_CHUNK_BYTES = 8 << 20


class LocalStore:
    """`refs.ArtifactStore` in a folder that may be shared by many runs and processes.

    An artifact is written under a scratch name, flushed, and renamed to its key, so that neither a crash nor a second
    writer of the same bytes can leave a part of it behind.
    """

    is_remote = False

    def __init__(self, root: Path) -> None:
        self._root = Path(os.path.abspath(root))

    @property
    def location(self) -> str:
        """The folder."""
        return str(self._root)

    def put_file(self, path: Path) -> StoreRef:
        """Store a copy of a file, see `refs.ArtifactStore`."""
        try:
            with path.open("rb") as source:
                size = os.fstat(source.fileno()).st_size
                with self._scratch(needed_bytes=size) as scratch:
                    key = _copy_and_hash(source, scratch)
                    fsync(scratch)
                    return self._admit(scratch, key, StoreKind.FILE)
        except OSError as error:
            raise StorageError(f"{path} cannot be read to be stored: {error.strerror}") from error

    def put_table(self, table: pa.Table) -> StoreRef:
        """Store a table as Parquet, see `tables.write_table`."""
        with self._scratch(needed_bytes=table.nbytes) as scratch:
            return self._admit(scratch, write_table(table, scratch), StoreKind.TABLE)

    def get(self, ref: StoreRef, *, verified: bool = False) -> Path:
        """The artifact's file, see `refs.ArtifactStore`."""
        path = self._path(ref.key)
        try:
            size = path.stat().st_size
        except FileNotFoundError as error:
            raise ArtifactLost(
                f"artifact {ref.key} is not in the store {self._root}; it was removed, or {_SETTING} differs from the "
                "run that stored it"
            ) from error
        if size != ref.size_bytes:
            raise ArtifactLost(f"artifact {path} was damaged after storing: {size:,} of {ref.size_bytes:,} bytes")
        if verified and (found := sha256_of(path)) != ref.key:
            raise ArtifactLost(f"artifact {path} was damaged after storing: its sha256 is now {found}")
        return path

    def verify(self, ref: StoreRef) -> None:
        """Hash the artifact again, see `refs.ArtifactStore`."""
        self.get(ref, verified=True)

    def copy(self, ref: StoreRef, target: Path) -> None:
        """A file of the caller's, see `refs.ArtifactStore`."""
        path = self.get(ref)
        with storage_errors(target, setting="storage.root", needed_bytes=ref.size_bytes), path.open("rb") as source:
            found = _copy_and_hash(source, target)
        if found != ref.key:
            target.unlink()
            raise ArtifactLost(f"artifact {path} was damaged after storing: its sha256 is now {found}")

    def artifacts(self) -> Iterator[Stored]:
        """See `refs.ArtifactStore`; what is removed meanwhile is left out."""
        yield from _listed(self._root / "objects", lambda path: path.name)

    def modified(self, key: str) -> float | None:
        """See `refs.ArtifactStore`."""
        with storage_errors(self._path(key), setting=_SETTING), suppress(FileNotFoundError):
            return self._path(key).stat().st_mtime
        return None

    def remove(self, key: str) -> None:
        """See `refs.ArtifactStore`."""
        with storage_errors(self._path(key), setting=_SETTING):
            self._path(key).unlink(missing_ok=True)

    def write_document(self, name: str, data: bytes) -> None:
        """See `refs.ArtifactStore`."""
        with whole_file(self._root / document_name(name), setting=_SETTING) as scratch:
            scratch.write_bytes(data)

    def read_document(self, name: str) -> bytes | None:
        """See `refs.ArtifactStore`."""
        path = self._root / document_name(name)
        with storage_errors(path, setting=_SETTING), suppress(FileNotFoundError):
            return path.read_bytes() if path.is_file() else None
        return None  # it went after we looked

    def documents(self, prefix: str) -> Iterator[Stored]:
        """See `refs.ArtifactStore`."""
        for found in _listed(
            self._root / prefix.rpartition("/")[0], lambda path: path.relative_to(self._root).as_posix()
        ):
            if found.name.startswith(prefix):
                yield found

    def remove_document(self, name: str) -> None:
        """See `refs.ArtifactStore`."""
        path = self._root / document_name(name)
        with storage_errors(path, setting=_SETTING):
            path.unlink(missing_ok=True)

    def unfinished(self) -> Iterator[Stored]:
        """Scratch files, see `refs.ArtifactStore`."""
        yield from _listed(self._root / "incoming", lambda path: path.name)

    def remove_unfinished(self, name: str) -> None:
        """See `refs.ArtifactStore`."""
        with storage_errors(self._root / "incoming" / name, setting=_SETTING):
            (self._root / "incoming" / name).unlink(missing_ok=True)

    def check_writable(self) -> None:
        """See `refs.ArtifactStore`."""
        with self._scratch(needed_bytes=1) as scratch:
            scratch.write_bytes(b"1")

    def _path(self, key: str) -> Path:
        return self._root / "objects" / key[:2] / key

    def _scratch(self, *, needed_bytes: int) -> AbstractContextManager[Path]:
        """A scratch name that is gone afterwards; refuses at once what cannot fit."""
        return new_file(self._root / "incoming", setting=_SETTING, needed_bytes=needed_bytes)

    def _admit(self, scratch: Path, key: str, kind: StoreKind) -> StoreRef:
        """Give the flushed scratch file its final name."""
        ref = StoreRef(key=key, size_bytes=scratch.stat().st_size, kind=kind)
        target = self._path(key)
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch.chmod(0o444)
        os.replace(scratch, target)  # over an equal or a damaged file of that name
        fsync(target.parent)
        return ref


def _listed(folder: Path, name: Callable[[Path], str]) -> Iterator[Stored]:
    """Files below a folder, in the order of their paths; one that goes meanwhile is left out."""
    for path in sorted(folder.rglob("*")):
        try:
            state = path.stat()
        except FileNotFoundError:
            continue
        if stat.S_ISREG(state.st_mode):
            yield Stored(name=name(path), size_bytes=state.st_size, modified=state.st_mtime)


def _copy_and_hash(source: BinaryIO, target: Path) -> str:
    """Copy a file and hash what was copied: the source may change in between, the copy may not. All or nothing."""
    digest = hashlib.sha256()
    copy = target.open("xb")
    try:
        with copy:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                copy.write(chunk)
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    return digest.hexdigest()
