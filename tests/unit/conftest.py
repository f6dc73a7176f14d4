"""One S3 service for all tests that need one."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.s3_service import aws_environment, s3_service


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    with s3_service() as endpoint:
        yield endpoint


@pytest.fixture
def s3_variables(s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The standard variables lead to the service; downloads are cached below the test's folder."""
    for name, value in (aws_environment(s3_endpoint) | {"XDG_CACHE_HOME": str(tmp_path / "cache")}).items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def s3_admin(s3_endpoint: str) -> Any:
    """A client of the service for what tests do behind the store's back; making one takes a second."""
    import boto3

    return boto3.client("s3", endpoint_url=s3_endpoint, aws_access_key_id="test", aws_secret_access_key="test")


@pytest.fixture
def bucket(s3_admin: Any, s3_variables: None) -> str:
    """A new bucket."""
    name = f"bucket-{uuid.uuid4().hex}"
    s3_admin.create_bucket(Bucket=name)
    return name
