"""A run's files in a store that every machine reaches, so that its steps need no shared disk.

A publication is a document that lists files with their hashes. It is written after them, so what can be fetched is
whole. With a local store every step sees the run's folder itself, and nothing is copied.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from grpo_lib.data.files import sha256_of, storage_errors
from grpo_lib.errors import ArtifactLost, StorageError
from grpo_lib.storage.refs import ArtifactStore, StoreRef

log = logging.getLogger(__name__)

RUNS = "runs/"
FORMAT = 1
_SETTING = "storage.root"
REGISTERED, PUBLISHED, REFERS = "registered.json", "published/", "refers/"  # below runs/<run id>/


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedFile:
    """One file of a publication."""

    path: PurePosixPath  # relative to the run's folder
    ref: StoreRef


class RunMirror:
    """What one run has in its store besides rollouts. Safe to use from several threads.

    Args:
        run_id: E.g. ``GRPOFlow/12``; unique in the store.
        folder: The run's folder on this machine; it need not exist.

    Raises:
        StorageError: in every method, when the store or the folder fails.
    """

    def __init__(self, store: ArtifactStore, *, run_id: str, folder: Path) -> None:
        self._store, self._run_id, self._folder = store, run_id, folder

    def register(self) -> None:
        """Tell the store that the run exists: `gc` keeps what a registered run refers to."""
        folder = None if self._store.is_remote else os.path.relpath(self._folder, self._store.location)
        record = {"format": FORMAT, "run_id": self._run_id, "folder": folder}
        self._store.write_document(self._document(REGISTERED), json.dumps(record).encode())

    def refer(self, name: str, *refs: StoreRef) -> None:
        """Say that the run needs artifacts that none of its files mentions, e.g. those in Metaflow's artifacts alone.

        Args:
            name: What they are; the same name again replaces them.
        """
        record = {"format": FORMAT, "run_id": self._run_id, "refs": [ref.to_dict() for ref in refs]}
        self._store.write_document(self._document(f"{REFERS}{name}.json"), json.dumps(record).encode())

    def publish(self, *paths: Path) -> None:
        """Make files and folders of the run available to other machines, each as it is now, one after the other."""
        if not self._store.is_remote:
            return
        for path in paths:
            files = [
                {"path": file.relative_to(self._folder).as_posix(), **self._store.put_file(file).to_dict()}
                for file in _files(path)
            ]
            text = json.dumps({"format": FORMAT, "run_id": self._run_id, "files": files}, indent=1)
            self._store.write_document(self._document(f"{PUBLISHED}{self._name(path)}.json"), text.encode())

    def fetch(self, *paths: Path) -> None:
        """Bring what was published to its place in the run's folder. What is there and equal stays, all else goes.

        Raises:
            StorageError: it was never published, or is damaged; what was there before is untouched.
        """
        if not self._store.is_remote:
            return
        for path in paths:
            files = self.files(path)
            if not self._is_here(path, files):
                self._bring(path, files)

    def withdraw(self, path: Path) -> None:
        """Other machines are no longer to find it; `gc` may free its bytes."""
        if self._store.is_remote:
            self._store.remove_document(self._document(f"{PUBLISHED}{self._name(path)}.json"))

    def published(self, below: Path | None = None) -> list[Path]:
        """Paths that can be fetched, in order.

        Args:
            below: Only those in this folder of the run.
        """
        if not self._store.is_remote:
            return []
        start = self._document(PUBLISHED)
        within = "" if below is None else f"{self._name(below)}/"
        names = (document.name.removeprefix(start) for document in self._store.documents(f"{start}{within}"))
        return [self._folder / name.removesuffix(".json") for name in names]

    def files(self, path: Path) -> list[PublishedFile]:
        """What was published at a path.

        Raises:
            StorageError: nothing was.
        """
        name = self._name(path)
        document = self._document(f"{PUBLISHED}{name}.json")
        data = self._store.read_document(document)
        if data is None:
            raise ArtifactLost(
                f"run {self._run_id} has no {name} in {self._store.location}: the step that writes it did not get "
                "there, or storage.store differs from the run's"
            )
        return list(published_files(data, where=f"{self._store.location}/{document}"))

    def _is_here(self, path: Path, files: list[PublishedFile]) -> bool:
        expected = {self._folder / file.path: file.ref for file in files}
        if set(_files(path)) != set(expected):
            return False
        return all(
            place.stat().st_size == ref.size_bytes and sha256_of(place) == ref.key for place, ref in expected.items()
        )

    def _bring(self, path: Path, files: list[PublishedFile]) -> None:
        """Whole or not at all: everything is copied beside the place, then moved to it."""
        log.info("fetching %s of run %s from %s", self._name(path), self._run_id, self._store.location)
        scratch = path.with_name(f".fetching-{path.name}-{uuid.uuid4().hex}")
        single = [file for file in files if self._folder / file.path == path]
        try:
            with storage_errors(path, setting=_SETTING):
                scratch.parent.mkdir(parents=True, exist_ok=True)
                if not single:
                    scratch.mkdir()
            for file in files:
                place = scratch if single else scratch / (self._folder / file.path).relative_to(path)
                with storage_errors(place, setting=_SETTING):
                    place.parent.mkdir(parents=True, exist_ok=True)
                self._store.copy(file.ref, place)
            with storage_errors(path, setting=_SETTING):
                if path.is_dir():
                    shutil.rmtree(path)
                os.replace(scratch, path)
        finally:
            if scratch.is_dir():
                shutil.rmtree(scratch)
            else:
                scratch.unlink(missing_ok=True)

    def _name(self, path: Path) -> str:
        return path.relative_to(self._folder).as_posix()

    def _document(self, name: str) -> str:
        return f"{RUNS}{self._run_id}/{name}"


def published_files(document: bytes, *, where: str) -> Iterator[PublishedFile]:
    """The files that a publication lists.

    Raises:
        StorageError: it is damaged, or names a file outside of the run's folder.
    """
    try:
        values: Mapping[str, Any] = json.loads(document)
        entries = [dict(entry) for entry in values["files"]] if values["format"] == FORMAT else None
        if entries is None:
            raise StorageError(f"{where} has format {values['format']!r}; this version reads {FORMAT}")
        for entry in entries:
            path = PurePosixPath(entry.pop("path"))
            if path.is_absolute() or ".." in path.parts:
                raise ArtifactLost(f"{where} names {str(path)!r}, which is not in the run's folder; it is damaged")
            yield PublishedFile(path=path, ref=StoreRef.from_dict(entry))
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactLost(f"{where} is damaged ({error!r}); publish it again") from error


def _files(path: Path) -> list[Path]:
    """A file itself, or all files of a folder in order."""
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.is_file())
    return [path] if path.is_file() else []
