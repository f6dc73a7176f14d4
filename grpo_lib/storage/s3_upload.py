"""Files into S3: small ones in one request, large ones in parts that a later process continues after a crash.

An unfinished upload belongs to a key, and a key is the hash of the bytes: parts that another process left are parts of
the same file. (boto3's transfer manager cannot continue an upload that another process began, so it does downloads.)
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO

from botocore.exceptions import ClientError

from grpo_lib.errors import StorageError
from grpo_lib.storage.s3_client import MANGLED, code_of

MIB = 1 << 20
_MAX_PARTS = 9_000  # S3 allows 10,000
_PARALLEL = 4
_SENDS = 3  # of bytes that the service found mangled


@dataclass(frozen=True, slots=True, kw_only=True)
class Digests:
    """sha256 of a file and of its parts."""

    whole: bytes
    size_bytes: int
    part_bytes: int
    parts: tuple[bytes, ...]  # empty for a file that goes in one request

    @property
    def key(self) -> str:
        return self.whole.hex()

    def match(self, checksum: str | None) -> bool:
        """Whether a checksum that S3 reports is that of this file, sent whole or in these parts."""
        if checksum is None:
            return False
        composite = base64_of(hashlib.sha256(b"".join(self.parts)).digest())
        return checksum in (base64_of(self.whole), composite, f"{composite}-{len(self.parts)}")


def digests(source: BinaryIO, size_bytes: int, *, part_bytes: int) -> Digests:
    """Read the first `size_bytes` of a file once. It may grow meanwhile: a log does while it is published."""
    whole, parts = hashlib.sha256(), []
    if size_bytes > part_bytes * _MAX_PARTS:
        part_bytes = math.ceil(size_bytes / _MAX_PARTS / MIB) * MIB
    read = 0
    while piece := source.read(min(part_bytes, size_bytes - read)):
        whole.update(piece)
        parts.append(hashlib.sha256(piece).digest())
        read += len(piece)
    return Digests(
        whole=whole.digest(), size_bytes=read, part_bytes=part_bytes, parts=tuple(parts) if len(parts) > 1 else ()
    )


def send_whole(client: Any, bucket: str, name: str, data: bytes) -> None:
    """One request. The service compares the bytes with their hash and keeps all of them or none.

    Raises:
        ClientError: the service refused, and so do the other functions.
    """
    checksum = base64_of(hashlib.sha256(data).digest())
    _sent(
        client.put_object,
        Bucket=bucket,
        Key=name,
        Body=data,
        ChecksumAlgorithm="SHA256",
        ChecksumSHA256=checksum,
    )


def send_parts(client: Any, bucket: str, name: str, source: BinaryIO, expected: Digests) -> None:
    """All parts that are not there yet, several at a time; the object appears with the last request.

    A failure leaves the parts that arrived, for whoever tries again; `gc` removes those that nobody continues.

    Raises:
        StorageError: the bytes are not those that were hashed.
    """
    where = {"Bucket": bucket, "Key": name}
    upload = (
        _unfinished(client, bucket, name)
        or client.create_multipart_upload(**where, ChecksumAlgorithm="SHA256")["UploadId"]
    )
    there = _parts_there(client, bucket, name, upload)
    tags: dict[int, str] = {}
    with ThreadPoolExecutor(max_workers=_PARALLEL, thread_name_prefix="upload") as pool:
        under_way: deque[tuple[int, Future[Any]]] = deque()
        for number, checksum in enumerate(expected.parts, start=1):
            rest = expected.size_bytes - (number - 1) * expected.part_bytes
            piece = source.read(min(expected.part_bytes, rest))
            if hashlib.sha256(piece).digest() != checksum:
                client.abort_multipart_upload(**where, UploadId=upload)
                raise StorageError(f"the file changed while it was sent to s3://{bucket}/{name}; store it again")
            if number in there and there[number].holds(piece, checksum):
                tags[number] = there[number].tag
                continue
            part = {"UploadId": upload, "PartNumber": number, "ChecksumSHA256": base64_of(checksum)}
            under_way.append((number, pool.submit(_sent, client.upload_part, **where, **part, Body=piece)))
            if len(under_way) > _PARALLEL:  # bounds what is in memory
                first, sent = under_way.popleft()
                tags[first] = sent.result()["ETag"]
        tags |= {number: sent.result()["ETag"] for number, sent in under_way}
    parts = [
        {"PartNumber": number, "ETag": tags[number], "ChecksumSHA256": base64_of(checksum)}
        for number, checksum in enumerate(expected.parts, start=1)
    ]
    client.complete_multipart_upload(**where, UploadId=upload, MultipartUpload={"Parts": parts})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A part that arrived in an earlier attempt."""

    tag: str
    size_bytes: int
    checksum: str | None  # some services do not tell

    def holds(self, piece: bytes, checksum: bytes) -> bool:
        if self.size_bytes != len(piece):
            return False
        if self.checksum is not None:
            return self.checksum == base64_of(checksum)
        return self.tag.strip('"') == hashlib.md5(piece, usedforsecurity=False).hexdigest()


def _unfinished(client: Any, bucket: str, name: str) -> str | None:
    """The newest upload of this name that has our kind of checksum."""
    pages = client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=name)
    found = [
        upload
        for page in pages
        for upload in page.get("Uploads", [])
        if upload["Key"] == name and upload.get("ChecksumAlgorithm") == "SHA256"
    ]
    return max(found, key=lambda upload: upload["Initiated"])["UploadId"] if found else None


def _parts_there(client: Any, bucket: str, name: str, upload: str) -> dict[int, _Part]:
    pages = client.get_paginator("list_parts").paginate(Bucket=bucket, Key=name, UploadId=upload)
    return {
        part["PartNumber"]: _Part(tag=part["ETag"], size_bytes=part["Size"], checksum=part.get("ChecksumSHA256"))
        for page in pages
        for part in page.get("Parts", [])
    }


def _sent(request: Callable[..., dict[str, Any]], **arguments: Any) -> dict[str, Any]:
    """The answer to a request with a body, which is sent again where it arrived mangled."""
    for _ in range(_SENDS - 1):
        try:
            return request(**arguments)
        except ClientError as error:
            if code_of(error) not in MANGLED:
                raise
    return request(**arguments)


def base64_of(digest: bytes) -> str:
    """As S3 writes checksums."""
    return base64.b64encode(digest).decode()
