"""References to stored artifacts, and what every store does. A run's records hold references, never the artifacts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from grpo_lib.errors import StorageError

_SHA256 = re.compile(r"[0-9a-f]{64}")


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


class ArtifactStore(Protocol):
    """Keeps artifacts under the hash of their bytes; equal bytes are kept once."""

    def put_file(self, path: Path) -> StoreRef:
        """Store a copy of a file. Nothing is visible under the key before all of it is safe.

        Raises:
            StorageError: no room, no permission, or the medium failed.
        """
        ...

    def put_table(self, table: pa.Table) -> StoreRef:
        """Store a table as Parquet; the same errors."""
        ...

    def get(self, ref: StoreRef) -> Path:
        """A local, read-only file with the artifact's bytes; its size was checked.

        Raises:
            StorageError: there is no such artifact, or it is not whole.
        """
        ...

    def verify(self, ref: StoreRef) -> None:
        """Read all bytes again and compare their hash with the key.

        Raises:
            StorageError: they differ, or there is no such artifact.
        """
        ...
