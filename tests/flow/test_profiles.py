"""One flow file, local or remote: what the profile makes of it. No cluster: Argo's template is compiled, not run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.flow.conftest import ROOT, flow_command
from tests.s3_service import aws_environment, s3_service

PROFILES = ROOT / "flows" / "profiles"


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    """Variables that point Metaflow at an S3 emulator with one bucket."""
    import boto3

    with s3_service() as endpoint:
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
        boto3.client("s3", endpoint_url=endpoint, **keys).create_bucket(Bucket="bucket")
        yield {
            **aws_environment(endpoint),
            "METAFLOW_S3_ENDPOINT_URL": endpoint,
            "METAFLOW_DATASTORE_SYSROOT_S3": "s3://bucket/metaflow",
            "METAFLOW_DEFAULT_METADATA": "local",
            "METAFLOW_KUBERNETES_NAMESPACE": "default",
        }


def compiled(folder: Path, flow: str, profile: Path, s3: dict[str, str]) -> dict[str, Any]:
    """The Argo workflow template of a flow under a profile."""
    done = flow_command(
        folder,
        *("--config", "profile", str(profile), "--datastore", "s3"),
        *("argo-workflows", "create", "--only-json"),
        flow=flow,
        variables=s3,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout[done.stdout.index("{") :])


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, s3: dict[str, str]) -> dict[str, Any]:
    """The main job under the k8s profile with a schedule added."""
    folder = tmp_path_factory.mktemp("argo")
    profile = json.loads((PROFILES / "k8s.json").read_text()) | {"schedule": "0 3 * * *"}
    (folder / "scheduled.json").write_text(json.dumps(profile))
    return compiled(folder, "grpo_flow", folder / "scheduled.json", s3)


@pytest.fixture(scope="module")
def nightly(tmp_path_factory: pytest.TempPathFactory, s3: dict[str, str]) -> dict[str, Any]:
    """The gate under the profile that deploys it every night."""
    return compiled(tmp_path_factory.mktemp("argo"), "parity_flow", PROFILES / "nightly.json", s3)


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


def test_the_gate_is_deployed_with_its_schedule_and_both_trainers_at_once(nightly: dict[str, Any]) -> None:
    assert "0 3 * * *" in json.dumps(nightly["metadata"])
    for name in ("rollouts", "measure", "join", "lockstep"):
        assert container(nightly, name)["container"]["resources"]["limits"]["nvidia.com/gpu"] == "8"
    for name in ("start", "gate", "compare", "end"):
        assert "nvidia.com/gpu" not in container(nightly, name)["container"]["resources"]["limits"]
    assert nightly["spec"]["parallelism"] >= 2, "one trainer after the other is for laptops"


def test_the_nightly_profile_is_the_k8s_profile_with_a_schedule() -> None:
    k8s, nightly = (json.loads((PROFILES / f"{name}.json").read_text()) for name in ("k8s", "nightly"))
    assert nightly == k8s | {"name": "nightly", "schedule": "0 3 * * *"}


def test_an_unknown_pool_is_named_before_anything_runs(tmp_path: Path) -> None:
    profile = tmp_path / "broken.json"
    profile.write_text(json.dumps({"name": "broken", "remote": True, "pools": {"cpu": {}}}))
    done = flow_command(tmp_path, "--config", "profile", str(profile), "show")
    assert done.returncode != 0
    assert "profile 'broken' has no pool 'gpu'; it has cpu" in done.stdout + done.stderr


@pytest.mark.parametrize("flow", ["grpo_flow", "parity_flow"])
def test_the_local_profile_adds_no_decorator(tmp_path: Path, flow: str) -> None:
    done = flow_command(tmp_path, "--no-pylint", "check", flow=flow)
    assert done.returncode == 0, done.stderr
