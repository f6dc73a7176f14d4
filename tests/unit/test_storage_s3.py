"""The store on a real service on the loopback: what is put is there, once, whole, and comes back."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_lib.errors import StorageError
from grpo_lib.storage import cache as cache_module
from grpo_lib.storage import s3
from grpo_lib.storage.cache import ArtifactCache
from grpo_lib.storage.locations import open_store
from grpo_lib.storage.refs import ArtifactStore, StoreKind, StoreRef
from grpo_lib.storage.s3 import S3Store
from tests.fault_proxy import FaultProxy, fault_proxy
from tests.s3_service import SMALLEST_PART_BYTES

ROOT = Path(__file__).resolve().parents[2]
BYTES = bytes(range(256)) * 40
PART = SMALLEST_PART_BYTES


@pytest.fixture
def store(bucket: str) -> ArtifactStore:
    return open_store(f"s3://{bucket}/some/prefix")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.bin"
    path.write_bytes(BYTES)
    return path


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A file of three parts."""
    path = tmp_path / "large.bin"
    path.write_bytes(os.urandom(2 * PART + 1000))
    return path


def in_parts(bucket: str, tmp_path: Path, client: Any = None) -> S3Store:
    return S3Store(bucket, "", cache=ArtifactCache(tmp_path / "cache2"), client=client, part_bytes=PART)


@pytest.fixture
def keys(s3_admin: Any, bucket: str) -> Callable[[], list[str]]:
    """All keys of the bucket, now."""
    return lambda: [found["Key"] for found in s3_admin.list_objects_v2(Bucket=bucket).get("Contents", [])]


def test_file_is_kept_under_its_hash(
    store: ArtifactStore, bucket: str, source: Path, tmp_path: Path, keys: Callable[[], list[str]]
) -> None:
    ref = store.put_file(source)
    key = hashlib.sha256(BYTES).hexdigest()
    assert ref == StoreRef(key=key, size_bytes=len(BYTES), kind=StoreKind.FILE)
    assert keys() == [f"some/prefix/objects/{key[:2]}/{key}"]
    source.write_bytes(b"changed afterwards")
    path = store.get(ref)
    assert path.read_bytes() == BYTES
    assert path.stat().st_mode & 0o777 == 0o444
    store.verify(ref)
    store.copy(ref, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == BYTES
    assert [(found.name, found.size_bytes) for found in store.artifacts()] == [(key, len(BYTES))]
    store.remove(key)
    assert list(store.artifacts()) == []
    with pytest.raises(StorageError, match=rf"s3://{bucket}/some/prefix/objects/.*{key} is not in the store"):
        store.verify(ref)
    assert store.get(ref) == path, "the cached copy is still good"


def test_equal_bytes_are_not_sent_again(
    bucket: str, large: Path, tmp_path: Path, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fault_proxy(s3_endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        store = in_parts(bucket, tmp_path)
        ref = store.put_file(large)
        assert proxy.count("PUT", "partNumber=") == 3
        small = tmp_path / "small"
        small.write_bytes(BYTES)
        store.put_file(small)
        before = len(proxy.seen)
        assert store.put_file(large) == ref
        store.put_file(small)
        assert {request.method for request in proxy.seen[before:]} == {"HEAD"}
        assert store.get(ref).read_bytes() == large.read_bytes()


def test_an_artifact_that_is_stored_again_later_counts_as_new(
    bucket: str, large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`gc` goes by age, and must not remove what a run has just stored and found to be there."""
    store = in_parts(bucket, tmp_path)
    ref = store.put_file(large)
    first = next(store.artifacts()).modified
    monkeypatch.setattr(s3, "_FRESH_S", 0.5)
    time.sleep(1.1)  # S3 counts seconds
    assert store.put_file(large) == ref
    assert next(store.artifacts()).modified > first
    store.verify(ref)


def test_an_object_that_somebody_replaced_is_noticed_and_mended(
    store: ArtifactStore, bucket: str, source: Path, keys: Callable[[], list[str]], s3_admin: Any
) -> None:
    ref = store.put_file(source)
    (name,) = keys()
    s3_admin.put_object(Bucket=bucket, Key=name, Body=BYTES[:-1] + b"?")
    with pytest.raises(StorageError, match=rf"s3://{bucket}/{name} was damaged after storing: .* store it again"):
        store.verify(ref)
    with pytest.raises(StorageError, match="was damaged after storing"):
        store.get(ref)
    assert store.put_file(source) == ref
    store.verify(ref)


def test_table_round_trip_and_no_second_transfer(store: ArtifactStore) -> None:
    table = pa.table({"x": [1, None, 3], "y": ["a", "b", "ß"]})
    ref = store.put_table(table)
    assert ref.kind is StoreKind.TABLE
    assert store.put_table(pa.table({"x": [1, None, 3], "y": ["a", "b", "ß"]})) == ref
    assert pq.read_table(store.get(ref)).equals(table)
    store.remove(ref.key)
    assert pq.read_table(store.get(ref)).equals(table), "what was written here is cached here"


def test_a_damaged_cached_copy_is_fetched_again(store: ArtifactStore, source: Path) -> None:
    ref = store.put_file(source)
    path = store.get(ref)
    path.chmod(0o644)
    path.write_bytes(BYTES[:-1] + b"?")
    assert store.get(ref).read_bytes()[-1:] == b"?", "only asked for, the bytes are read"
    assert store.get(ref, verified=True).read_bytes() == BYTES
    path.chmod(0o644)
    path.write_bytes(b"short")
    assert store.get(ref).read_bytes() == BYTES


def test_empty_file(store: ArtifactStore, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    ref = store.put_file(tmp_path / "empty")
    assert (ref.size_bytes, store.get(ref).read_bytes()) == (0, b"")


def test_documents_are_replaced_listed_and_removed(store: ArtifactStore) -> None:
    assert store.read_document("runs/F/1/a.json") is None
    store.write_document("runs/F/1/a.json", b"1")
    store.write_document("runs/F/1/a.json", b"22")
    store.write_document("runs/F/10/a.json", b"3")
    assert store.read_document("runs/F/1/a.json") == b"22"
    assert [(found.name, found.size_bytes) for found in store.documents("runs/F/1/")] == [("runs/F/1/a.json", 2)]
    store.remove_document("runs/F/1/a.json")
    store.remove_document("runs/F/1/a.json")
    assert [found.name for found in store.documents("runs/")] == ["runs/F/10/a.json"]
    for name in ("../x", "a//b", "a/.b", "/a", ""):
        with pytest.raises(StorageError, match="cannot name a document"):
            store.write_document(name, b"")


def test_the_check_leaves_nothing(store: ArtifactStore, bucket: str, keys: Callable[[], list[str]]) -> None:
    store.check_writable()
    assert keys() == []


def test_a_killed_upload_is_continued_and_never_visible(
    bucket: str,
    large: Path,
    tmp_path: Path,
    s3_endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    keys: Callable[[], list[str]],
) -> None:
    """SIGKILL after the second of three parts: no object; the next process sends the third part only."""
    program = f"""
import os
from pathlib import Path
from grpo_lib.storage import s3_upload
from grpo_lib.storage.cache import ArtifactCache
from grpo_lib.storage.s3 import S3Store
s3_upload._PARALLEL = 1
sent = s3_upload._sent
def third_kills(request, **part):
    if part["PartNumber"] == 3:
        os.kill(os.getpid(), 9)
    return sent(request, **part)
s3_upload._sent = third_kills
store = S3Store({bucket!r}, "", cache=ArtifactCache(Path({str(tmp_path / "c")!r})), part_bytes={PART})
store.put_file(Path({str(large)!r}))
"""
    killed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert keys() == []
    with fault_proxy(s3_endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        store = in_parts(bucket, tmp_path)
        assert len(list(store.unfinished())) == 1
        ref = store.put_file(large)
        assert [request.target.partition("partNumber=")[2][:1] for request in sent_parts(proxy)] == ["3"]
        assert list(store.unfinished()) == []
        store.verify(ref)


def test_parts_of_other_bytes_are_not_taken_over(bucket: str, large: Path, tmp_path: Path, s3_admin: Any) -> None:
    """Somebody else's parts under our key, one of them of the right size."""
    store, client = in_parts(bucket, tmp_path), s3_admin
    key = hashlib.sha256(large.read_bytes()).hexdigest()
    where = {"Bucket": bucket, "Key": f"objects/{key[:2]}/{key}"}
    upload = client.create_multipart_upload(**where, ChecksumAlgorithm="SHA256")["UploadId"]
    client.upload_part(**where, UploadId=upload, PartNumber=1, Body=bytes(PART), ChecksumAlgorithm="SHA256")
    client.upload_part(**where, UploadId=upload, PartNumber=2, Body=b"short", ChecksumAlgorithm="SHA256")
    store.verify(store.put_file(large))


def test_abandoned_parts_can_be_removed(bucket: str, tmp_path: Path, s3_admin: Any) -> None:
    store = in_parts(bucket, tmp_path)
    s3_admin.create_multipart_upload(Bucket=bucket, Key="objects/ab/" + "ab" * 32)
    s3_admin.create_multipart_upload(Bucket=bucket, Key="somebody/elses")
    (found,) = store.unfinished()
    store.remove_unfinished(found.name)
    store.remove_unfinished(found.name)
    assert list(store.unfinished()) == []


def test_a_file_that_changes_while_it_is_sent(
    bucket: str, large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: Callable[[], list[str]]
) -> None:
    store = in_parts(bucket, tmp_path)
    hashed = s3.digests

    def then_changed(source: Any, size_bytes: int, *, part_bytes: int) -> Any:
        found = hashed(source, size_bytes, part_bytes=part_bytes)
        with large.open("r+b") as file:
            file.seek(PART + 3)
            file.write(b"other")
        return found

    monkeypatch.setattr(s3, "digests", then_changed)
    with pytest.raises(StorageError, match=rf"file changed while it was sent to s3://{bucket}/objects"):
        store.put_file(large)
    assert keys() == []
    assert list(store.unfinished()) == []


@pytest.mark.parametrize("size", [1000, PART, 2 * PART, 2 * PART + 1000])
def test_a_file_that_grows_while_it_is_sent(
    bucket: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was there at first is stored, as of a log that the run appends to."""
    store, path = in_parts(bucket, tmp_path), tmp_path / "metrics.jsonl"
    before = os.urandom(size)
    path.write_bytes(before)
    hashed = s3.digests

    def append() -> None:
        with path.open("ab") as file:
            file.write(b"one more row\n" * 1000)

    def between_appends(source: Any, size_bytes: int, *, part_bytes: int) -> Any:
        append()
        found = hashed(source, size_bytes, part_bytes=part_bytes)
        append()
        return found

    monkeypatch.setattr(s3, "digests", between_appends)
    ref = store.put_file(path)
    assert (ref.key, ref.size_bytes) == (hashlib.sha256(before).hexdigest(), size)
    store.verify(ref)


@pytest.mark.parametrize("left", [0, PART, PART + 1])
def test_a_file_that_shrinks_while_it_is_sent(
    bucket: str, left: int, large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: Callable[[], list[str]]
) -> None:
    store = in_parts(bucket, tmp_path)
    hashed = s3.digests

    def then_cut(source: Any, size_bytes: int, *, part_bytes: int) -> Any:
        found = hashed(source, size_bytes, part_bytes=part_bytes)
        os.truncate(large, left)
        return found

    monkeypatch.setattr(s3, "digests", then_cut)
    with pytest.raises(StorageError, match=rf"file changed while it was sent to s3://{bucket}/objects"):
        store.put_file(large)
    assert keys() == []


def test_a_cached_file_is_on_the_disk_before_its_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[bytes] = []
    cache = ArtifactCache(tmp_path)
    monkeypatch.setattr(cache_module, "fsync", lambda path: flushed.append(path.read_bytes()))
    with cache.scratch(4) as scratch:
        scratch.write_bytes(b"text")
        monkeypatch.setattr(os, "replace", lambda source, target: flushed.append(b"named"))
        cache.admit(scratch, "aa" * 32)
    assert flushed == [b"text", b"named"]


def test_the_cache_is_bounded_and_forgets_the_least_recently_used(tmp_path: Path) -> None:
    cache = ArtifactCache(tmp_path, limit_bytes=350)
    for number, name in enumerate(("aa", "bb", "cc")):
        with cache.scratch(100) as scratch:
            scratch.write_bytes(bytes(100))
            path = cache.admit(scratch, name * 32)
        os.utime(path, times=(number, number))
    assert cache.find("aa" * 32, 100) is not None, "used now"
    with cache.scratch(100) as scratch:
        scratch.write_bytes(bytes(100))
        cache.admit(scratch, "dd" * 32)
    present = [name for name in ("aa", "bb", "cc", "dd") if cache.find(name * 32, 100)]
    assert present == ["aa", "cc", "dd"]


def sent_parts(proxy: FaultProxy) -> list[Any]:
    return [request for request in proxy.seen if request.method == "PUT" and "partNumber=" in request.target]
