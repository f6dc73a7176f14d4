"""From `storage.store` to a store: a folder, or ``s3://bucket/prefix``."""

from __future__ import annotations

import os
from pathlib import Path

from grpo_lib.storage.local import LocalStore
from grpo_lib.storage.refs import ArtifactStore

_S3 = "s3://"


def is_remote(location: str) -> bool:
    """Whether the location is a service rather than a folder."""
    return location.startswith(_S3)


def open_store(location: str, *, cache: Path | None = None) -> ArtifactStore:
    """The store at a location. Nothing is read or written yet.

    Endpoint, credentials and region of S3 come from where every AWS client takes them: ``AWS_ENDPOINT_URL_S3``,
    ``AWS_PROFILE``, ``AWS_ACCESS_KEY_ID``, the instance's role, …

    Args:
        cache: Folder for what was downloaded; the user's cache when absent, see `cache.default_cache`.

    Raises:
        StorageError: the location cannot be a store.
    """
    if not is_remote(location):
        return LocalStore(Path(location))
    from grpo_lib.storage.cache import ArtifactCache, default_cache  # a run on local disks does without boto3
    from grpo_lib.storage.s3 import S3Store

    bucket, _, prefix = location.removeprefix(_S3).partition("/")
    return S3Store(bucket, prefix.strip("/"), cache=ArtifactCache(cache or default_cache(os.environ)))
