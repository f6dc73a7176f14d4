import errno
import hashlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_lib.data import files
from grpo_lib.errors import StorageError
from grpo_lib.storage.local import LocalStore
from grpo_lib.storage.refs import ArtifactStore, StoreKind, StoreRef
from tests.full_disk import largest_file

ROOT = Path(__file__).resolve().parents[2]
BYTES = bytes(range(256)) * 40


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.bin"
    path.write_bytes(BYTES)
    return path


def stored_files(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "store").rglob("*") if path.is_file()]


def test_file_is_kept_under_its_hash_and_only_once(store: LocalStore, source: Path, tmp_path: Path) -> None:
    ref = store.put_file(source)
    assert ref == StoreRef(key=hashlib.sha256(BYTES).hexdigest(), size_bytes=len(BYTES), kind=StoreKind.FILE)
    source.write_bytes(b"changed afterwards")
    path = store.get(ref)
    assert path.read_bytes() == BYTES
    assert path.stat().st_mode & 0o777 == 0o444
    (tmp_path / "copy.bin").write_bytes(BYTES)
    assert store.put_file(tmp_path / "copy.bin") == ref
    assert stored_files(tmp_path) == [path]
    store.verify(ref)
    as_interface: ArtifactStore = store
    assert as_interface.get(ref) == path


def test_empty_file(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    ref = store.put_file(tmp_path / "empty")
    assert (ref.size_bytes, store.get(ref).read_bytes()) == (0, b"")


def test_table_round_trip_and_equal_tables_share_a_key(store: LocalStore) -> None:
    table = pa.table({"x": [1, None, 3], "y": ["a", "b", "ß"]})
    ref = store.put_table(table)
    assert ref.kind is StoreKind.TABLE
    assert pq.read_table(store.get(ref)).equals(table)
    assert store.put_table(pa.table({"x": [1, None, 3], "y": ["a", "b", "ß"]})) == ref
    assert store.put_table(pa.table({"x": [1, None, 4], "y": ["a", "b", "ß"]})) != ref


def test_damage_is_noticed_and_mended_by_storing_again(store: LocalStore, source: Path, tmp_path: Path) -> None:
    ref = store.put_file(source)
    path = store.get(ref)
    path.chmod(0o644)
    path.write_bytes(BYTES[:-1] + b"?")
    assert store.get(ref) == path  # the size is right: only `verify` reads the bytes
    with pytest.raises(StorageError, match="damaged after storing: its sha256 is now"):
        store.verify(ref)
    path.write_bytes(BYTES[:100])
    with pytest.raises(StorageError, match="damaged after storing: 100 of 10,240 bytes"):
        store.get(ref)
    assert store.put_file(source) == ref
    store.verify(ref)
    path.unlink()
    with pytest.raises(StorageError, match=r"not in the store .*; it was removed, or storage\.store differs"):
        store.get(ref)


def test_missing_source(store: LocalStore, tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(StorageError, match="cannot be read to be stored"):
            store.put_file(path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"key": "../../etc/passwd", "size_bytes": 1, "kind": "file"}, "not a store key"),
        ({"key": "A" * 64, "size_bytes": 1, "kind": "file"}, "not a store key"),
        ({"key": "a" * 64 + "\n", "size_bytes": 1, "kind": "file"}, "not a store key"),
        ({"key": "a" * 64, "size_bytes": -1, "kind": "file"}, "cannot have -1 bytes"),
        ({"key": "a" * 64, "size_bytes": True, "kind": "file"}, "not a store reference"),
        ({"key": "a" * 64, "size_bytes": 1, "kind": "folder"}, r"\(file or table\)"),
        ({"key": "a" * 64, "size_bytes": 1}, "has the fields key, size_bytes and kind"),
        ({"key": "a" * 64, "size_bytes": 1, "kind": "file", "more": 1}, "not a store reference"),
    ],
)
def test_malformed_references(values: dict[str, object], message: str) -> None:
    with pytest.raises(StorageError, match=message):
        StoreRef.from_dict(values)


def test_reference_survives_json(store: LocalStore, source: Path) -> None:
    ref = store.put_file(source)
    assert StoreRef.from_dict(json.loads(json.dumps(ref.to_dict()))) == ref


def test_what_cannot_fit_is_refused_with_the_figures(
    store: LocalStore, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "free_bytes", lambda path: 10_000)
    with pytest.raises(StorageError, match=r"10,240 bytes needed, 10,000 bytes free .* point storage\.store to a disk"):
        store.put_file(source)
    assert stored_files(tmp_path) == []


def test_disk_that_fills_while_writing_leaves_nothing(store: LocalStore, source: Path, tmp_path: Path) -> None:
    noise = pa.table({"x": [hashlib.sha256(str(i).encode()).hexdigest() for i in range(500)]})
    with largest_file(4096):
        for put in (lambda: store.put_file(source), lambda: store.put_table(noise)):
            with pytest.raises(StorageError, match=r"File too large: [\d,]+ bytes needed, [\d,]+ bytes free") as caught:
                put()
            assert isinstance(caught.value.__cause__, OSError)
            assert caught.value.__cause__.errno == errno.EFBIG
    assert stored_files(tmp_path) == []
    store.verify(store.put_file(source))


def test_a_copy_that_does_not_fit_leaves_nothing(store: LocalStore, source: Path, tmp_path: Path) -> None:
    ref, target = store.put_file(source), tmp_path / "copy"
    with largest_file(4096), pytest.raises(StorageError, match=r"File too large: 10,240 bytes needed"):
        store.copy(ref, target)
    assert not target.exists()
    target.write_bytes(b"of somebody")
    with pytest.raises(StorageError, match="File exists"):
        store.copy(ref, target)
    assert target.read_bytes() == b"of somebody"


def test_unwritable_root(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match=r"Not a directory; check the folder and its disk, or point storage\.store"):
        LocalStore(source / "store").put_file(source)

    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", forbidden)
    with pytest.raises(StorageError, match="Permission denied; make the folder writable for this user"):
        LocalStore(tmp_path / "store").put_file(source)


def test_writer_killed_half_way_leaves_no_key(tmp_path: Path) -> None:
    """Killed between the bytes and the name: the object is absent, and storing it again works."""
    program = f"""
import os
from pathlib import Path
from grpo_lib.storage import local
local.os.replace = lambda source, target: os.kill(os.getpid(), 9)
path = Path({str(tmp_path / "source.bin")!r})
path.write_bytes(b"x" * 1000)
local.LocalStore(Path({str(tmp_path / "store")!r})).put_file(path)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    store = LocalStore(tmp_path / "store")
    ref = StoreRef(key=hashlib.sha256(b"x" * 1000).hexdigest(), size_bytes=1000, kind=StoreKind.FILE)
    with pytest.raises(StorageError, match="not in the store"):
        store.get(ref)
    assert store.put_file(tmp_path / "source.bin") == ref
    store.verify(ref)
