"""A real S3 service on this machine's loopback, for tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from moto.s3 import models
from moto.server import ThreadedMotoServer

SMALLEST_PART_BYTES = 100_000  # of an upload in parts; 5 MiB in S3 itself, where a test would take seconds


@contextmanager
def s3_service() -> Iterator[str]:
    """Its endpoint's URL, on a free port; it ends with the block."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    setattr(models, "S3_UPLOAD_PART_MIN_SIZE", SMALLEST_PART_BYTES)  # noqa: B010  # moto exports it nowhere
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def aws_environment(endpoint: str) -> dict[str, str]:
    """The standard variables that lead a client there, and nowhere else."""
    return {
        "AWS_ENDPOINT_URL_S3": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
