"""References to stored artifacts, and what every store does. A run's records hold references, never the artifacts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from grpo_lib.errors import StorageError

_SHA256 = re.compile(r"[0-9a-f]{64}")
_DOCUMENT = re.compile(r"(?!\.)[\w.-]+(/(?!\.)[\w.-]+)*", re.ASCII)


class StoreKind(StrEnum):
    """What the bytes are."""

    FILE = "file"
    TABLE = "table"  # Parquet


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRef:
    """One stored artifact. The key is the sha256 of its bytes, so a reference also proves what it refers to."""

    key: str  # 64 lower-case hex digits
    size_bytes: int
    kind: StoreKind

    def __post_init__(self) -> None:
        if not _SHA256.fullmatch(self.key):
            raise StorageError(f"{self.key!r:.100} is not a store key; a key is a sha256 in lower-case hex")
        if self.size_bytes < 0:
            raise StorageError(f"stored artifact {self.key} cannot have {self.size_bytes} bytes")

    def to_dict(self) -> dict[str, object]:
        """Plain values, for JSON lines and run artifacts."""
        return {**asdict(self), "kind": self.kind.value}

    @staticmethod
    def from_dict(values: Mapping[str, object]) -> StoreRef:
        """The inverse of `to_dict`.

        Raises:
            StorageError: a field is missing, unknown or malformed.
        """
        key, size, kind = (values.get(name) for name in ("key", "size_bytes", "kind"))
        kinds = [one.value for one in StoreKind]
        if len(values) != 3 or not isinstance(key, str) or type(size) is not int or kind not in kinds:
            raise StorageError(
                f"{dict(values)!r:.200} is not a store reference; it has the fields key, size_bytes and kind "
                f"({' or '.join(kinds)})"
            )
        return StoreRef(key=key, size_bytes=size, kind=StoreKind(kind))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What a store says about one thing in it without reading it."""

    name: str  # an artifact's key, or a document's name
    size_bytes: int
    modified: float  # Unix time, by the store's clock


class ArtifactStore(Protocol):
    """Keeps artifacts under the hash of their bytes, equal bytes once; and small documents under names.

    Artifacts never change. A document is replaced as a whole: it says which artifacts belong together, is written after
    them, and so is what makes them visible.
    """

    @property
    def location(self) -> str:
        """What `open_store` was given, in full."""
        ...

    @property
    def is_remote(self) -> bool:
        """Whether machines that share no disk with this one reach it."""
        ...

    def put_file(self, path: Path) -> StoreRef:
        """Store a copy of a file. Nothing is visible under the key before all of it is safe.

        Raises:
            StorageError: no room, no permission, or the medium failed.
        """
        ...

    def put_table(self, table: pa.Table) -> StoreRef:
        """Store a table as Parquet; the same errors."""
        ...

    def get(self, ref: StoreRef, *, verified: bool = False) -> Path:
        """A local, read-only file with the artifact's bytes. Its size was checked, and its hash if it came from afar.

        Args:
            verified: Hash the bytes of that file now.

        Raises:
            StorageError: there is no such artifact, or it is not whole.
        """
        ...

    def copy(self, ref: StoreRef, target: Path) -> None:
        """Write the artifact's bytes to a new file of the caller's, whose hash was checked; the same errors."""
        ...

    def verify(self, ref: StoreRef) -> None:
        """Read all bytes again and compare their hash with the key.

        Raises:
            StorageError: they differ, or there is no such artifact.
        """
        ...

    def artifacts(self) -> Iterator[Stored]:
        """Every artifact, by key."""
        ...

    def modified(self, key: str) -> float | None:
        """When an artifact was last stored, as in `artifacts`; None where there is none."""
        ...

    def remove(self, key: str) -> None:
        """Remove an artifact; one that is not there is no error. Only `gc` may know that nobody needs it."""
        ...

    def write_document(self, name: str, data: bytes) -> None:
        """Replace a document as a whole.

        Args:
            name: E.g. ``runs/GRPOFlow/12/published/data.json``, see `document_name`.
        """
        ...

    def read_document(self, name: str) -> bytes | None:
        """A document's bytes; None where there is none."""
        ...

    def documents(self, prefix: str) -> Iterator[Stored]:
        """Documents whose name starts with `prefix`, by name."""
        ...

    def remove_document(self, name: str) -> None:
        """Remove a document; one that is not there is no error."""
        ...

    def unfinished(self) -> Iterator[Stored]:
        """What writers that died have left, by a name for `remove_unfinished`; it is not visible as an artifact."""
        ...

    def remove_unfinished(self, name: str) -> None:
        """Free what one of `unfinished` holds."""
        ...

    def check_writable(self) -> None:
        """Write, read and remove a small document, without much patience.

        Raises:
            StorageError: that does not work; the message says what to do.
        """
        ...


def document_name(name: str) -> str:
    """The name itself: pieces of letters, digits, ``_ . -`` that do not begin with a point, parted by slashes.

    Raises:
        StorageError: it is another kind of name.
    """
    if not _DOCUMENT.fullmatch(name):
        raise StorageError(f"{name!r:.200} cannot name a document of a store; use letters, digits and _ . - between /")
    return name
