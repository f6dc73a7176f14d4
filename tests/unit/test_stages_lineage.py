"""A run's origin holds what can change its numbers, and nothing that is secret."""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path

import pytest

from grpo_lib.config import resolve
from grpo_lib.data.models import resolve_model_path
from grpo_lib.stages import lineage as origin
from grpo_lib.stages.lineage import installed_versions, is_switch, lineage


def test_every_installed_package_is_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    config = resolve("embedded_addition")
    found = lineage(config, resolve_model_path(config.model.path))
    packages, environment = found["packages"], found["environment"]
    assert isinstance(packages, dict)
    assert isinstance(environment, dict)
    assert isinstance(found["switches"], dict)
    assert packages["torch"] == importlib.metadata.version("torch")
    assert packages["flash-attn"] is None, "a relevant package that is absent is recorded as absent"
    assert environment["pydantic"] == importlib.metadata.version("pydantic")
    assert not packages.keys() & environment.keys()
    assert found["switches"]["VLLM_BATCH_INVARIANT"] == "1"
    assert found["seeds"] == {"run": config.seed, "engine": config.rollout.seed}


def test_names_are_normalised() -> None:
    assert "ai2-olmo-core" in installed_versions()
    assert not [name for name in installed_versions() if "_" in name or name != name.lower()]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("OMP_NUM_THREADS", True),
        ("CUBLAS_WORKSPACE_CONFIG", True),
        ("VLLM_BATCH_INVARIANT", True),
        ("TORCHINDUCTOR_MAX_AUTOTUNE", True),
        ("NCCL_ALGO", True),
        ("VLLM_API_KEY", False),
        ("TORCH_HUB_CREDENTIALS", False),
        ("VLLM_CACHE_ROOT", False),
        ("TORCH_LOGS_PATH", False),
        ("HOME", False),
        ("AWS_SECRET_ACCESS_KEY", False),
    ],
)
def test_switches(name: str, expected: bool) -> None:
    assert is_switch(name) is expected


def test_uncommitted_code_changes_the_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a checkout of its own: a change, and a file that was never added, each give another hash; data gives none."""

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    package = tmp_path / "grpo_lib" / "stages"
    package.mkdir(parents=True)
    (package / "lineage.py").write_text("a = 1\n")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    monkeypatch.setattr(origin, "__file__", str(package / "lineage.py"))
    states = [origin.git_state()]
    (tmp_path / "data.bin").write_bytes(b"0" * 100)
    states.append(origin.git_state())
    (package / "lineage.py").write_text("a = 2\n")
    states.append(origin.git_state())
    (package / "new.py").write_text("b = 1\n")
    states.append(origin.git_state())
    (package / "new.py").write_text("b = 2\n")
    states.append(origin.git_state())
    digests = [state["diff_sha256"] if state else None for state in states]
    assert digests[:2] == ["", ""], "clean, and still clean with data beside the code"
    assert len({*digests[1:]}) == 4
    assert len({state["commit"] for state in states if state}) == 1


def test_outside_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin, "__file__", str(tmp_path / "lineage.py"))
    assert origin.git_state() is None
