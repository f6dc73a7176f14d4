"""One flow file, local or remote: what the profile makes of it. No cluster: Argo's template is compiled, not run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.flow.conftest import ROOT, environment


def flow_command(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "flows/grpo_flow.py", *arguments],
        cwd=ROOT,
        env=environment(folder) | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The Argo workflow template of the k8s profile with a schedule added, compiled against an S3 emulator."""
    import boto3
    from moto.server import ThreadedMotoServer

    folder = tmp_path_factory.mktemp("argo")
    profile = json.loads((ROOT / "flows/profiles/k8s.json").read_text()) | {"schedule": "0 3 * * *"}
    (folder / "nightly.json").write_text(json.dumps(profile))
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        endpoint = "http://{}:{}".format(*server.get_host_and_port())
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
        boto3.client("s3", endpoint_url=endpoint, **keys).create_bucket(Bucket="bucket")
        done = flow_command(
            folder,
            *("--config", "profile", str(folder / "nightly.json"), "--datastore", "s3"),
            *("argo-workflows", "create", "--only-json"),
            METAFLOW_S3_ENDPOINT_URL=endpoint,
            METAFLOW_DATASTORE_SYSROOT_S3="s3://bucket/metaflow",
            METAFLOW_DEFAULT_METADATA="local",
            METAFLOW_KUBERNETES_NAMESPACE="default",
            AWS_ACCESS_KEY_ID="test",
            AWS_SECRET_ACCESS_KEY="test",
            AWS_DEFAULT_REGION="us-east-1",
        )
    finally:
        server.stop()
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout[done.stdout.index("{") :])


def container(template: dict[str, Any], name: str) -> dict[str, Any]:
    return next(t for t in template["spec"]["templates"] if t["name"] == name)


def test_training_steps_get_the_gpu_pool(template: dict[str, Any]) -> None:
    for name in ("shard-model", "sync-weights", "fit", "evaluate", "parity-report"):
        step = container(template, name)
        assert step["container"]["resources"]["limits"]["nvidia.com/gpu"] == "8"
        assert "/dev/shm" in {mount["mountPath"] for mount in step["container"]["volumeMounts"]}
        assert step["tolerations"][0]["key"] == "nvidia.com/gpu"
        assert step["retryStrategy"]["limit"] == 2


def test_every_step_runs_in_the_projects_image(template: dict[str, Any]) -> None:
    for name in ("start", "prepare-data", "fit", "end"):
        assert container(template, name)["container"]["image"] == "grpo:latest"
    assert "nvidia.com/gpu" not in container(template, "start")["container"]["resources"]["limits"]


def test_the_schedule_reaches_the_deployment(template: dict[str, Any]) -> None:
    assert "0 3 * * *" in json.dumps(template["metadata"])


def test_an_unknown_pool_is_named_before_anything_runs(tmp_path: Path) -> None:
    profile = tmp_path / "broken.json"
    profile.write_text(json.dumps({"name": "broken", "remote": True, "pools": {"cpu": {}}}))
    done = flow_command(tmp_path, "--config", "profile", str(profile), "show")
    assert done.returncode != 0
    assert "profile 'broken' has no pool 'gpu'; it has cpu" in done.stdout + done.stderr


def test_the_local_profile_adds_no_decorator(tmp_path: Path) -> None:
    done = flow_command(tmp_path, "--no-pylint", "check")
    assert done.returncode == 0, done.stderr
