"""A client of S3 with bounded patience, and its failures as errors that name bucket, key and the way out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import boto3
import botocore.session
from boto3.exceptions import Boto3Error
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    HTTPClientError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    ReadTimeoutError,
)
from s3transfer.exceptions import RetriesExceededError

from grpo_lib.errors import StorageError

_NEEDED = "s3:ListBucket, s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucketMultipartUploads"
_FORBIDDEN = {
    "403", "AccessDenied", "AllAccessDisabled", "ExpiredToken", "InvalidAccessKeyId", "InvalidToken",
    "SignatureDoesNotMatch", "TokenRefreshRequired",
}  # fmt: skip
_FULL = {"507", "InsufficientStorage", "QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded"}
_BUSY = {
    "500", "502", "503", "504", "InternalError", "OperationAborted", "RequestTimeout", "ServiceUnavailable", "SlowDown",
    "Throttling", "ThrottlingException", "TooManyRequests",
}  # fmt: skip
# The service refuses bytes that changed or were cut off on their way; sent again, they may arrive.
MANGLED = {
    "BadDigest", "IncompleteBody", "InvalidDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch",
}  # fmt: skip
_INTACT = "What was stored is intact, and a large upload continues where it stopped"
ABSENT = {"404", "NoSuchKey", "NotFound"}
GONE = {"NoSuchUpload"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a request may take. Between attempts the client waits longer each time, up to 20 s."""

    attempts: int
    connect_timeout_s: float
    read_timeout_s: float


PATIENT = Patience(attempts=8, connect_timeout_s=10.0, read_timeout_s=60.0)
HASTY = Patience(attempts=2, connect_timeout_s=5.0, read_timeout_s=10.0)  # for a person who waits


def s3_client(patience: Patience = PATIENT) -> Any:
    """A client configured as every AWS client is; `AWS_MAX_ATTEMPTS` overrides the attempts of `PATIENT`.

    Raises:
        StorageError: the standard configuration contradicts itself.
    """
    try:
        core = botocore.session.get_session()
        chosen = core.get_config_variable("max_attempts") if patience is PATIENT else None
        retries: Any = {"mode": "standard", "total_max_attempts": chosen or patience.attempts}
        return boto3.Session(botocore_session=core).client(
            "s3",
            config=Config(
                retries=retries,
                connect_timeout=patience.connect_timeout_s,
                read_timeout=patience.read_timeout_s,
                max_pool_connections=16,
            ),
        )
    except (BotoCoreError, ValueError) as error:
        raise StorageError(
            f"S3 cannot be used: {error}; check AWS_PROFILE, AWS_ENDPOINT_URL_S3 and the files in ~/.aws"
        ) from error


@contextmanager
def s3_errors(action: str, bucket: str, key: str) -> Iterator[None]:
    """Turn every failure of the block's requests into a `StorageError`.

    Args:
        action: E.g. ``"write"``.
    """
    try:
        yield
    except ClientError as error:
        raise StorageError(f"cannot {action} s3://{bucket}/{key}: {_refusal(error, bucket)}") from error
    except (BotoCoreError, Boto3Error, RetriesExceededError) as error:
        raise StorageError(f"cannot {action} s3://{bucket}/{key}: {_failure(error)}") from error


def code_of(error: ClientError) -> str:
    """The service's code, e.g. ``NoSuchKey``, or the HTTP status where the answer had no body."""
    return str(error.response.get("Error", {}).get("Code", ""))


def _refusal(error: ClientError, bucket: str) -> str:
    code, answer = code_of(error), error.response.get("Error", {})
    attempts = error.response.get("ResponseMetadata", {}).get("RetryAttempts", 0) + 1
    said = f"{code} ({answer.get('Message', 'no message')})"
    if code == "NoSuchBucket":
        return f"{said}; create the bucket {bucket}, or correct storage.store"
    if code in _FORBIDDEN:
        return (
            f"{said}; allow this identity {_NEEDED} there, or choose another one by AWS_PROFILE or AWS_ACCESS_KEY_ID "
            "and AWS_SECRET_ACCESS_KEY"
        )
    if code in _FULL:
        return f"{said}; free space in the bucket (grpo store gc), or point storage.store elsewhere"
    if code in _BUSY:
        return (
            f"{said} after {attempts} attempts; the service is overloaded or down, try again later, or raise "
            f"AWS_MAX_ATTEMPTS. {_INTACT}"
        )
    if code in MANGLED:
        return f"{said}: bytes change on their way; look for a proxy or a bad link between here and the service"
    return f"{said}; check AWS_ENDPOINT_URL_S3, AWS_REGION and storage.store"


def _failure(error: Exception) -> str:
    cause = error.last_exception if isinstance(error, RetriesExceededError) else error
    said = str(cause).strip() or type(cause).__name__
    if isinstance(cause, NoCredentialsError | PartialCredentialsError | ProfileNotFound):
        return f"{said}; set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    if isinstance(cause, EndpointConnectionError | ConnectTimeoutError):
        return f"{said}; check AWS_ENDPOINT_URL_S3 and the network"
    if isinstance(cause, ReadTimeoutError):
        return f"{said}; the service is too slow, try again later. {_INTACT}"
    if isinstance(cause, HTTPClientError):
        return (
            f"{said}; the connection broke on every attempt: check the network and AWS_ENDPOINT_URL_S3, then try "
            f"again. {_INTACT}"
        )
    return f"{said}; check AWS_ENDPOINT_URL_S3, AWS_REGION and storage.store, then try again"
