"""The store on S3 or a service that speaks it: ``prefix/objects/ab/ab12…``, named by sha256, whole or absent.

S3 shows an object only when all of it has arrived and its checksum is right, so an artifact goes straight to its key.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
from boto3.s3.transfer import TransferConfig
from botocore.exceptions import ClientError, IncompleteReadError, ReadTimeoutError, ResponseStreamingError

from grpo_lib.data.files import sha256_of, storage_errors
from grpo_lib.errors import ArtifactLost, StorageError
from grpo_lib.storage.cache import ArtifactCache
from grpo_lib.storage.refs import Stored, StoreKind, StoreRef, document_name
from grpo_lib.storage.s3_client import ABSENT, GONE, HASTY, code_of, s3_client, s3_errors
from grpo_lib.storage.s3_upload import MIB, Digests, digests, send_parts, send_whole
from grpo_lib.storage.tables import write_table

_COPY_LIMIT_BYTES = 5 << 30  # of a copy inside S3 in one request
_FRESH_S = 900.0  # an artifact that is stored again later than this counts as new: `gc` looks at its age
_BREAKS = 5  # of the connection while one object is read


class S3Store:
    """`refs.ArtifactStore` in a bucket.

    Args:
        prefix: Before every key, without slashes at its ends; may be empty.
        cache: Where downloads go.
        client: Of boto3; a patient one with the standard configuration when absent.
        part_bytes: Size of the parts of larger files, at least 5 MiB; they grow with files of more than 140 GiB.

    Raises:
        StorageError: in every method, naming bucket and key.
    """

    is_remote = True

    def __init__(
        self, bucket: str, prefix: str, *, cache: ArtifactCache, client: Any = None, part_bytes: int = 16 * MIB
    ) -> None:
        self._bucket, self._prefix, self._cache = bucket, f"{prefix}/" if prefix else "", cache
        self._part_bytes = part_bytes
        self._client = s3_client() if client is None else client

    @property
    def location(self) -> str:
        """``s3://bucket/prefix``."""
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def put_file(self, path: Path) -> StoreRef:
        """See `refs.ArtifactStore`. What is there and equal is not sent again."""
        try:
            with path.open("rb") as source:
                return self._put(source, StoreKind.FILE)
        except OSError as error:
            raise StorageError(f"{path} cannot be read to be stored: {error.strerror}") from error

    def put_table(self, table: pa.Table) -> StoreRef:
        """Store a table as Parquet, see `tables.write_table`; the file also stays in the cache."""
        with self._cache.scratch(table.nbytes) as scratch:
            write_table(table, scratch)
            with scratch.open("rb") as source:
                ref = self._put(source, StoreKind.TABLE)
            self._cache.admit(scratch, ref.key)
        return ref

    def get(self, ref: StoreRef, *, verified: bool = False) -> Path:
        """A file in the cache, see `refs.ArtifactStore`."""
        path = self._cache.find(ref.key, ref.size_bytes)
        if path is not None and verified and sha256_of(path) != ref.key:
            self._cache.drop(ref.key)
            path = None
        if path is not None:
            return path
        with self._cache.scratch(ref.size_bytes) as scratch:
            self._download(ref, scratch)
            return self._cache.admit(scratch, ref.key)

    def copy(self, ref: StoreRef, target: Path) -> None:
        """See `refs.ArtifactStore`; past the cache, which a checkpoint would only sweep clean."""
        try:
            with storage_errors(target, setting="storage.root", needed_bytes=ref.size_bytes):
                self._download(ref, target)
        except StorageError:
            target.unlink(missing_ok=True)
            raise

    def verify(self, ref: StoreRef) -> None:
        """Read the stored bytes, not the cached ones, see `refs.ArtifactStore`."""
        name, digest, num_bytes = self._object(ref.key), hashlib.sha256(), 0
        with s3_errors("read", self._bucket, name):
            try:
                for piece in _stream(self._client, self._bucket, name):
                    digest.update(piece)
                    num_bytes += len(piece)
            except ClientError as error:
                raise self._missing(name, error) from error
        self._compare(ref, num_bytes, digest.hexdigest())

    def artifacts(self) -> Iterator[Stored]:
        """See `refs.ArtifactStore`."""
        for found in self._listed("objects/"):
            yield Stored(name=found.name.rpartition("/")[2], size_bytes=found.size_bytes, modified=found.modified)

    def modified(self, key: str) -> float | None:
        """See `refs.ArtifactStore`."""
        name = self._object(key)
        with s3_errors("read", self._bucket, name):
            try:
                return self._client.head_object(Bucket=self._bucket, Key=name)["LastModified"].timestamp()
            except ClientError as error:
                if code_of(error) in ABSENT:
                    return None
                raise

    def remove(self, key: str) -> None:
        """See `refs.ArtifactStore`."""
        self._delete(self._object(key))

    def write_document(self, name: str, data: bytes) -> None:
        """See `refs.ArtifactStore`."""
        self._write(self._client, f"{self._prefix}{document_name(name)}", data)

    def read_document(self, name: str) -> bytes | None:
        """See `refs.ArtifactStore`."""
        return self._read(self._client, f"{self._prefix}{document_name(name)}")

    def documents(self, prefix: str) -> Iterator[Stored]:
        """See `refs.ArtifactStore`."""
        yield from self._listed(prefix)

    def remove_document(self, name: str) -> None:
        """See `refs.ArtifactStore`."""
        self._delete(f"{self._prefix}{document_name(name)}")

    def unfinished(self) -> Iterator[Stored]:
        """Uploads in parts that did not get to their end; the size is unknown and given as 0."""
        start = f"{self._prefix}objects/"
        with s3_errors("list the unfinished uploads of", self._bucket, start):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket, Prefix=start)
            for page in pages:
                for upload in page.get("Uploads", []):
                    name = f"{upload['Key'].removeprefix(self._prefix)}?{upload['UploadId']}"
                    yield Stored(name=name, size_bytes=0, modified=upload["Initiated"].timestamp())

    def remove_unfinished(self, name: str) -> None:
        """See `refs.ArtifactStore`."""
        key, _, upload = name.partition("?")
        with s3_errors("remove an unfinished upload of", self._bucket, f"{self._prefix}{key}"):
            try:
                self._client.abort_multipart_upload(Bucket=self._bucket, Key=f"{self._prefix}{key}", UploadId=upload)
            except ClientError as error:
                if code_of(error) not in GONE:
                    raise

    def check_writable(self) -> None:
        """See `refs.ArtifactStore`."""
        client, key = s3_client(HASTY), f"{self._prefix}checks/{uuid.uuid4().hex}"
        self._write(client, key, b"written by a check, and removed by it")
        if self._read(client, key) is None:
            raise StorageError(f"s3://{self._bucket}/{key} was written and is not there; the service is not consistent")
        self._delete(key, client)

    def _put(self, source: BinaryIO, kind: StoreKind) -> StoreRef:
        expected = digests(source, os.fstat(source.fileno()).st_size, part_bytes=self._part_bytes)
        name = self._object(expected.key)
        with s3_errors("write", self._bucket, name):
            if not self._is_there(name, expected):
                self._send(name, source, expected)
        return StoreRef(key=expected.key, size_bytes=expected.size_bytes, kind=kind)

    def _send(self, name: str, source: BinaryIO, expected: Digests) -> None:
        source.seek(0)
        if not expected.parts:
            data = source.read(expected.size_bytes)
            if hashlib.sha256(data).digest() != expected.whole:
                raise StorageError(f"the file changed while it was sent to s3://{self._bucket}/{name}; store it again")
            send_whole(self._client, self._bucket, name, data)
            return
        try:
            send_parts(self._client, self._bucket, name, source, expected)
        except ClientError as error:
            if code_of(error) not in GONE:
                raise
            # Another writer of the same bytes has shared the upload and completed it.
            if not self._is_there(name, expected):
                source.seek(0)
                send_parts(self._client, self._bucket, name, source, expected)

    def _is_there(self, name: str, expected: Digests) -> bool:
        """Whether the object exists with these bytes. One of some age is made new: `gc` may be about to remove it."""
        try:
            head = self._client.head_object(Bucket=self._bucket, Key=name, ChecksumMode="ENABLED")
        except ClientError as error:
            if code_of(error) in ABSENT:
                return False
            raise
        if head["ContentLength"] != expected.size_bytes or not expected.match(head.get("ChecksumSHA256")):
            return False
        now = parsedate_to_datetime(head["ResponseMetadata"]["HTTPHeaders"]["date"])  # the service's clock
        if (now - head["LastModified"]).total_seconds() < _FRESH_S:
            return True
        if expected.size_bytes > _COPY_LIMIT_BYTES:
            return False
        where = {"Bucket": self._bucket, "Key": name}
        try:
            self._client.copy_object(**where, CopySource=where, MetadataDirective="REPLACE", ChecksumAlgorithm="SHA256")
        except ClientError as error:
            if code_of(error) in ABSENT:
                return False
            raise
        return True

    def _download(self, ref: StoreRef, target: Path) -> None:
        """Write the object's bytes to a file and compare their hash with the key."""
        name = self._object(ref.key)
        config = TransferConfig(
            multipart_threshold=self._part_bytes, multipart_chunksize=self._part_bytes, max_concurrency=4
        )
        with s3_errors("read", self._bucket, name), target.open("wb") as file:
            try:
                self._client.download_fileobj(self._bucket, name, file, Config=config)
            except ClientError as error:
                raise self._missing(name, error) from error
        self._compare(ref, target.stat().st_size, sha256_of(target))

    def _missing(self, name: str, error: ClientError) -> Exception:
        """The error itself, or the one that says that there is no such artifact."""
        if code_of(error) not in ABSENT:
            return error
        return ArtifactLost(
            f"artifact s3://{self._bucket}/{name} is not in the store; it was removed, or storage.store differs from "
            "the run that stored it"
        )

    def _compare(self, ref: StoreRef, num_bytes: int, sha256: str) -> None:
        if (num_bytes, sha256) != (ref.size_bytes, ref.key):
            raise ArtifactLost(
                f"artifact s3://{self._bucket}/{self._object(ref.key)} was damaged after storing: {num_bytes:,} of "
                f"{ref.size_bytes:,} bytes with sha256 {sha256}; store it again from its source, or remove it"
            )

    def _listed(self, start: str) -> Iterator[Stored]:
        with s3_errors("list", self._bucket, f"{self._prefix}{start}"):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=f"{self._prefix}{start}"
            )
            for page in pages:
                for found in page.get("Contents", []):
                    yield Stored(
                        name=found["Key"].removeprefix(self._prefix),
                        size_bytes=found["Size"],
                        modified=found["LastModified"].timestamp(),
                    )

    def _object(self, key: str) -> str:
        return f"{self._prefix}objects/{key[:2]}/{key}"

    def _write(self, client: Any, key: str, data: bytes) -> None:
        with s3_errors("write", self._bucket, key):
            send_whole(client, self._bucket, key, data)

    def _read(self, client: Any, key: str) -> bytes | None:
        with s3_errors("read", self._bucket, key):
            try:
                return b"".join(_stream(client, self._bucket, key))
            except ClientError as error:
                if code_of(error) in ABSENT:
                    return None
                raise

    def _delete(self, key: str, client: Any = None) -> None:
        with s3_errors("remove", self._bucket, key):
            (client or self._client).delete_object(Bucket=self._bucket, Key=key)


def _stream(client: Any, bucket: str, name: str) -> Iterator[bytes]:
    """An object's bytes in order, in bounded memory and without a file. Where the connection breaks it goes on from
    there; that the object is still the same one is up to the service, by its tag."""
    position, tag, breaks = 0, "", 0
    while True:
        rest = {"Range": f"bytes={position}-", "IfMatch": tag} if position else {}
        answer = client.get_object(Bucket=bucket, Key=name, **rest)
        tag, left = answer["ETag"], answer["ContentLength"]
        try:
            for piece in answer["Body"].iter_chunks(MIB):
                position, left = position + len(piece), left - len(piece)
                yield piece
        except (IncompleteReadError, ReadTimeoutError, ResponseStreamingError):
            breaks += 1
            if breaks == _BREAKS:
                raise
        if left == 0:
            return
