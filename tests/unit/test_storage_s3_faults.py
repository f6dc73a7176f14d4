"""What goes wrong between us and S3: nothing corrupt is ever visible, and messages name bucket, key and the way out."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_lib.errors import StorageError
from grpo_lib.storage.cache import ArtifactCache
from grpo_lib.storage.refs import StoreKind, StoreRef
from grpo_lib.storage.s3 import S3Store
from grpo_lib.storage.s3_client import Patience, s3_client
from tests.fault_proxy import Fault, FaultProxy, Request, fault_proxy
from tests.full_disk import largest_file
from tests.s3_service import SMALLEST_PART_BYTES, aws_environment

PART = SMALLEST_PART_BYTES
SMALL = os.urandom(PART)
LARGE = os.urandom(2 * PART + 1000)  # three parts
QUICK = Patience(attempts=2, connect_timeout_s=2.0, read_timeout_s=1.5)


@pytest.fixture(scope="module")
def proxy(s3_endpoint: str) -> Iterator[FaultProxy]:
    with fault_proxy(s3_endpoint) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def through_proxy(proxy: FaultProxy) -> Iterator[Any]:
    """A client that goes through it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in aws_environment(proxy.endpoint).items():
            patch.setenv(name, value)
        yield s3_client(QUICK)


class Place:
    """The same bucket twice: through the proxy, and as somebody else sees it."""

    def __init__(self, bucket: str, tmp_path: Path, proxy: FaultProxy, *, client: Any, healthy: Any) -> None:
        self.bucket, self.tmp_path, self.proxy = bucket, tmp_path, proxy
        self.healthy = S3Store(bucket, "p", cache=ArtifactCache(tmp_path / "other"), client=healthy)
        self.store = S3Store(bucket, "p", cache=ArtifactCache(tmp_path / "cache"), client=client, part_bytes=PART)

    def file(self, data: bytes) -> Path:
        path = self.tmp_path / "file"
        path.write_bytes(data)
        return path

    def visible(self) -> list[str]:
        """Keys that others see; whatever they see is whole."""
        found = list(self.healthy.artifacts())
        for one in found:
            self.healthy.verify(StoreRef(key=one.name, size_bytes=one.size_bytes, kind=StoreKind.FILE))
        return [one.name for one in found]


@pytest.fixture
def place(bucket: str, tmp_path: Path, proxy: FaultProxy, through_proxy: Any, s3_admin: Any) -> Iterator[Place]:
    proxy.seen.clear()
    proxy.plan = lambda request: None
    yield Place(bucket, tmp_path, proxy, client=through_proxy, healthy=s3_admin)
    proxy.plan = lambda request: None


def named(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def is_upload(request: Request) -> bool:
    return request.method == "PUT"


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["whole", "parts"])
@pytest.mark.parametrize(
    "fault", [Fault.RESET, Fault.RESET_AFTER, Fault.BUSY, Fault.SILENT, Fault.CUT_UPLOAD, Fault.MANGLED]
)
def test_an_upload_survives_one_failure(place: Place, fault: Fault, data: bytes) -> None:
    failed: list[int] = []

    def once(request: Request) -> Fault | None:
        if is_upload(request) and not failed:
            failed.append(request.number)
            return fault
        return None

    place.proxy.plan = once
    ref = place.store.put_file(place.file(data))
    assert failed
    assert place.visible() == [ref.key] == [named(data)]


REMEDIES = [
    (Fault.RESET, "connection broke on every attempt: check the network and AWS_ENDPOINT_URL_S3"),
    (Fault.BUSY, r"SlowDown \(Please reduce your request rate.\) after 2 attempts; .* raise AWS_MAX_ATTEMPTS"),
    (Fault.SILENT, "too slow, try again later"),
    (Fault.CUT_UPLOAD, "connection broke on every attempt"),
    (Fault.FORBIDDEN, "AccessDenied .* allow this identity s3:ListBucket, s3:GetObject, s3:PutObject.* AWS_PROFILE"),
    (
        Fault.FULL,
        r"InsufficientStorage .* free space in the bucket \(grpo store gc\), or point storage.store elsewhere",
    ),
    (Fault.MANGLED, "BadDigest .* bytes change on their way; look for a proxy"),
]


@pytest.mark.parametrize(("fault", "remedy"), REMEDIES, ids=lambda value: getattr(value, "name", ""))
def test_an_upload_that_cannot_succeed_leaves_nothing_visible(place: Place, fault: Fault, remedy: str) -> None:
    place.proxy.plan = lambda request: fault if is_upload(request) else None
    key = named(SMALL)
    where = rf"cannot write s3://{place.bucket}/p/objects/{key[:2]}/{key}: "
    with pytest.raises(StorageError, match=f"{where}.*{remedy}"):
        place.store.put_file(place.file(SMALL))
    assert place.visible() == []


@pytest.mark.parametrize("fault", [Fault.RESET, Fault.BUSY, Fault.FORBIDDEN, Fault.CUT_UPLOAD])
def test_a_large_upload_that_broke_goes_on_where_it_stopped(place: Place, fault: Fault) -> None:
    place.proxy.plan = lambda request: fault if "partNumber=3" in request.target else None
    with pytest.raises(StorageError, match=rf"s3://{place.bucket}/p/objects/"):
        place.store.put_file(place.file(LARGE))
    assert place.visible() == []
    place.proxy.plan = lambda request: None
    before = len(place.proxy.seen)
    ref = place.store.put_file(place.file(LARGE))
    sent = [request.target for request in place.proxy.seen[before:] if is_upload(request)]
    assert len(sent) == 1
    assert "partNumber=3" in sent[0]
    assert place.visible() == [ref.key]


def test_the_last_request_of_a_large_upload_is_done_but_its_answer_is_lost(place: Place) -> None:
    """The service completed it; the repeated request finds no such upload, and that is no failure."""
    lost: list[int] = []

    def lose(request: Request) -> Fault | None:
        if request.method == "POST" and "uploadId=" in request.target and not lost:
            lost.append(request.number)
            return Fault.RESET_AFTER
        return None

    place.proxy.plan = lose
    ref = place.store.put_file(place.file(LARGE))
    assert lost
    assert place.visible() == [ref.key]


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["whole", "parts"])
@pytest.mark.parametrize("fault", [Fault.RESET, Fault.BUSY, Fault.SILENT, Fault.CUT_DOWNLOAD])
def test_a_download_survives_one_failure(place: Place, fault: Fault, data: bytes) -> None:
    ref = place.healthy.put_file(place.file(data))
    failed: list[int] = []

    def once(request: Request) -> Fault | None:
        if request.method == "GET" and not failed:
            failed.append(request.number)
            return fault
        return None

    place.proxy.plan = once
    assert place.store.get(ref).read_bytes() == data
    assert failed


@pytest.mark.parametrize("fault", [Fault.CUT_DOWNLOAD, Fault.FORBIDDEN, Fault.BUSY])
def test_a_download_that_cannot_succeed_leaves_no_file(place: Place, fault: Fault) -> None:
    ref = place.healthy.put_file(place.file(SMALL))
    place.proxy.plan = lambda request: fault if request.method == "GET" else None
    where = rf"cannot read s3://{place.bucket}/p/objects/{ref.key[:2]}/{ref.key}: "
    with pytest.raises(StorageError, match=where):
        place.store.get(ref)
    with pytest.raises(StorageError, match=where):
        place.store.copy(ref, place.tmp_path / "copy")
    assert not (place.tmp_path / "copy").exists()
    assert [path for path in (place.tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_a_storm_is_sat_out(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three requests are refused, from the first to the last."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", place.proxy.endpoint)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "6")
    store = S3Store(place.bucket, "p", cache=ArtifactCache(place.tmp_path / "cache"), client=s3_client())
    place.proxy.plan = lambda request: Fault.BUSY if request.number % 3 else None
    ref = store.put_file(place.file(SMALL))
    assert store.get(ref).read_bytes() == SMALL
    assert len(place.proxy.seen) >= 12


def test_permission_that_is_lost_between_two_steps(place: Place) -> None:
    first = place.store.put_file(place.file(SMALL))
    place.proxy.plan = lambda request: Fault.FORBIDDEN
    with pytest.raises(
        StorageError, match=rf"s3://{place.bucket}/p/objects/.*(403|AccessDenied).* allow this identity"
    ):
        place.store.put_file(place.file(b"the next step's"))
    assert place.visible() == [first.key]


def test_documents_are_replaced_whole_or_not_at_all(place: Place) -> None:
    place.store.write_document("runs/F/1/data.json", b"old" * 1000)
    for fault in (Fault.CUT_UPLOAD, Fault.BUSY, Fault.FORBIDDEN):
        place.proxy.plan = lambda request, fault=fault: fault
        with pytest.raises(StorageError, match=rf"cannot write s3://{place.bucket}/p/runs/F/1/data.json"):
            place.store.write_document("runs/F/1/data.json", b"new" * 1000)
        assert place.healthy.read_document("runs/F/1/data.json") == b"old" * 1000


def test_a_disk_that_fills_while_downloading(place: Place) -> None:
    ref = place.healthy.put_file(place.file(SMALL))
    with largest_file(4096):
        with pytest.raises(StorageError, match=r"File too large: 100,000 bytes needed.* point XDG_CACHE_HOME to"):
            place.store.get(ref)
        with pytest.raises(StorageError, match=r"File too large: 100,000 bytes needed.* point storage\.root to"):
            place.store.copy(ref, place.tmp_path / "copy")
    left = [path for path in place.tmp_path.rglob("*") if path.is_file() and path.name != "file"]
    assert left == []
    assert place.store.get(ref).read_bytes() == SMALL


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("s3://no-such-bucket/p", r"s3://no-such-bucket/p/checks/.* create the bucket no-such-bucket, or correct"),
        ("nowhere", "Could not connect to the endpoint URL.*; check AWS_ENDPOINT_URL_S3 and the network"),
        ("nobody", "Unable to locate credentials; set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    ],
)
def test_the_early_check_says_what_is_wrong(
    s3_variables: None, monkeypatch: pytest.MonkeyPatch, location: str, message: str
) -> None:
    from grpo_lib.storage.locations import open_store

    if location == "nowhere":
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    if location == "nobody":
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    store = open_store(location if location.startswith("s3://") else "s3://bucket/p")
    with pytest.raises(StorageError, match=message):
        store.check_writable()
