"""The runs that a store knows, and which artifacts they refer to.

References are read from wherever a run leaves JSON: its documents in the store, and its folder, or with a remote store
the JSON files that it published. Every sha256 in them counts, whatever it is the hash of: keeping too much is harmless.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lib.errors import StorageError
from grpo_lib.storage.mirror import PUBLISHED, REFERS, REGISTERED, RUNS, published_files
from grpo_lib.storage.refs import ArtifactStore, StoreRef

_HASH = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
_JSON = (".json", ".jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRun:
    """One run of a store."""

    run_id: str
    registered: float  # Unix time
    last_sign: float  # of life: when it last wrote something here or in its folder
    folder: Path | None  # with a local store; None too where it is gone
    folder_is_missing: bool
    published: tuple[str, ...]  # names


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """What a run's files say about artifacts."""

    keys: frozenset[str]  # every sha256 that is mentioned
    refs: frozenset[StoreRef]  # those written as store references, which therefore must be there


def known_runs(store: ArtifactStore) -> list[KnownRun]:
    """Every registered run, by id.

    Raises:
        StorageError: the store cannot be read, or a registration is damaged.
    """
    documents: dict[str, dict[str, float]] = {}
    for document in store.documents(RUNS):
        run_id, name = _parted(document.name)
        documents.setdefault(run_id, {})[name] = document.modified
    return [_known_run(store, run_id, names) for run_id, names in sorted(documents.items())]


def references(store: ArtifactStore, run: KnownRun) -> References:
    """All artifacts that a run refers to.

    Raises:
        StorageError: something that it wrote cannot be read.
    """
    keys: set[str] = set()
    refs: set[StoreRef] = set()
    for data in _texts(store, run):
        keys.update(match.decode() for match in _HASH.findall(data))
        refs.update(_refs_in(data))
    return References(keys=frozenset(keys), refs=frozenset(refs))


def forget(store: ArtifactStore, run_id: str) -> None:
    """Remove a run's documents; what only it referred to is then garbage. Its folder, if there is one, stays.

    Raises:
        StorageError: the store knows no such run, or cannot be written.
    """
    names = [document.name for document in store.documents(f"{RUNS}{run_id}/")]
    if not names:
        raise StorageError(f"{store.location} knows no run {run_id!r}; grpo store ls shows those it knows")
    for name in names:
        store.remove_document(name)


def _parted(document: str) -> tuple[str, str]:
    """``runs/GRPOFlow/1/published/data.json`` → (``GRPOFlow/1``, ``published/data.json``)."""
    parts = document.removeprefix(RUNS).split("/")
    stop = next((i for i, part in enumerate(parts) if f"{part}/" in (PUBLISHED, REFERS) or part == REGISTERED), 1)
    return "/".join(parts[:stop]), "/".join(parts[stop:])


def _known_run(store: ArtifactStore, run_id: str, documents: dict[str, float]) -> KnownRun:
    data = store.read_document(f"{RUNS}{run_id}/{REGISTERED}") if REGISTERED in documents else None
    try:
        relative = json.loads(data)["folder"] if data is not None else None
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{store.location}/{RUNS}{run_id}/{REGISTERED} is damaged: {error!r}") from error
    # By name alone, as `RunMirror.register` found it: `..` of a link to the store leads elsewhere on the disk.
    folder = None if relative is None else Path(os.path.normpath(os.path.join(store.location, relative)))
    present = folder if folder is not None and folder.is_dir() else None
    signs = [*documents.values(), *(() if present is None else (_modified(path) for path in _below(present)))]
    return KnownRun(
        run_id=run_id,
        registered=documents.get(REGISTERED, min(documents.values())),
        last_sign=max(signs),
        folder=present,
        folder_is_missing=folder is not None and present is None,
        published=tuple(
            name.removeprefix(PUBLISHED).removesuffix(".json") for name in documents if name.startswith(PUBLISHED)
        ),
    )


def _texts(store: ArtifactStore, run: KnownRun) -> Iterator[bytes]:
    """All JSON that a run has written."""
    for document in store.documents(f"{RUNS}{run.run_id}/"):
        data = store.read_document(document.name)
        if data is None:
            continue
        yield data
        if _parted(document.name)[1].startswith(PUBLISHED):
            for file in published_files(data, where=f"{store.location}/{document.name}"):
                if file.path.suffix in _JSON:
                    yield store.get(file.ref, verified=True).read_bytes()
    if run.folder is not None:
        for path in _below(run.folder):
            if path.suffix in _JSON and (data := _content(path)) is not None:
                yield data


def _refs_in(data: bytes) -> Iterator[StoreRef]:
    """Store references in a JSON text or in lines of JSON; text that is neither has none."""
    try:
        values = [json.loads(data)]
    except ValueError:
        values = []
        for line in data.splitlines():
            try:
                values.append(json.loads(line))
            except ValueError:  # half a line, of a process that died
                continue
    for value in values:
        yield from _walk(value)


def _walk(value: Any) -> Iterator[StoreRef]:
    if isinstance(value, dict):
        with suppress(KeyError, StorageError):  # another kind of object
            yield StoreRef.from_dict({name: value[name] for name in ("key", "size_bytes", "kind")})
        for inner in value.values():
            yield from _walk(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _walk(inner)


def _below(folder: Path) -> Iterator[Path]:
    """All files and folders in a folder, in order. A run at work removes some meanwhile; they are left out."""

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise StorageError(
                f"{error.filename} cannot be read ({error.strerror}), so what a run refers to is unknown"
            )

    for place, folders, files in os.walk(folder, onerror=refuse):
        folders.sort()
        yield from (Path(place, name) for name in sorted([*folders, *files]))


def _content(path: Path) -> bytes | None:
    """A file's bytes; None where it is none, or is gone."""
    try:
        return path.read_bytes() if path.is_file() else None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"{path} cannot be read ({error.strerror}), so what a run refers to is unknown") from error


def _modified(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:  # a run at work removes files too
        return 0.0
