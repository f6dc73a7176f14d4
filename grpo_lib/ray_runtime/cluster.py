"""A Ray cluster for the length of a `with` block: one on this machine, or an existing one by its address."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import ray

from grpo_lib.config import RuntimeConfig
from grpo_lib.errors import PreflightError

# Read by Ray's daemons when they start: no call home, no exporter of metrics that nobody reads, and no spare workers,
# which actors with an environment of their own could not use.
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "false",
    "RAY_prestart_worker_first_driver": "false",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceDemand:
    """What one group of actors reserves."""

    name: str
    count: int
    cpus: float  # of each
    gpus: float  # of each

    def __str__(self) -> str:
        return f"{self.count} x {self.name} ({self.cpus:g} CPU, {self.gpus:g} GPU each)"


def check_demands(demands: Sequence[ResourceDemand], *, cpus: float, gpus: float) -> None:
    """Raise `PreflightError` with the shortfall if all groups together ask for more than there is."""
    problems: list[str] = []
    for unit, asked, there in (
        ("CPU", sum(demand.count * demand.cpus for demand in demands), cpus),
        ("GPU", sum(demand.count * demand.gpus for demand in demands), gpus),
    ):
        if asked > there:
            problems.append(f"{asked:g} {unit}s are asked for and {there:g} exist: {asked - there:g} short")
    if problems:
        raise PreflightError(
            f"{'; '.join(problems)}. The request is {' + '.join(str(demand) for demand in demands)}; lower "
            "trainer.num_ranks, rollout.num_engines or the shares under runtime.*"
        )


def check_cluster(*demands: ResourceDemand) -> None:
    """`check_demands` against the whole connected cluster, busy or not."""
    total = ray.cluster_resources()
    check_demands(demands, cpus=total.get("CPU", 0.0), gpus=total.get("GPU", 0.0))


@contextmanager
def local_cluster(
    runtime: RuntimeConfig,
    *,
    demands: Sequence[ResourceDemand] = (),
    address: str = "local",
    num_cpus: float | None = None,
    log_to_driver: bool = False,
) -> Iterator[None]:
    """Connect to Ray, and disconnect at the end in any case; what was started here is also stopped here.

    ``address="local"`` always starts a cluster of its own. Ray's default would follow the address file that a killed
    cluster leaves behind, and fail, or join a stranger's cluster.

    Args:
        demands: Groups that will run together, checked before anything starts.
        address: ``"local"``, or the address of a running cluster (KubeRay).
        num_cpus: CPUs that the local cluster offers; by default those that this process may use.
        log_to_driver: Show the actors' output here.

    Raises:
        PreflightError: the machine cannot hold `demands`.
    """
    if ray.is_initialized():
        raise RuntimeError("this process is already connected to a Ray cluster; a second one cannot be opened in it")
    if address != "local":
        ray.init(address=address, log_to_driver=log_to_driver, logging_level=logging.ERROR)
    else:
        cpus = float(len(os.sched_getaffinity(0))) if num_cpus is None else num_cpus
        check_demands(demands, cpus=cpus, gpus=_visible_gpus(demands))
        _start_local(runtime, cpus, log_to_driver)
    try:
        check_cluster(*demands)
        yield
    finally:
        ray.shutdown()


def _start_local(runtime: RuntimeConfig, cpus: float, log_to_driver: bool) -> None:
    before = {name: os.environ.get(name) for name in _QUIET}
    os.environ.update(_QUIET)
    try:
        ray.init(
            address="local",
            num_cpus=int(cpus),
            object_store_memory=runtime.object_store_mib * 2**20,
            include_dashboard=False,
            log_to_driver=log_to_driver,
            logging_level=logging.ERROR,
        )
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _visible_gpus(demands: Sequence[ResourceDemand]) -> float:
    """GPUs that a cluster on this machine would offer; not counted when nobody asks for one."""
    if not any(demand.gpus for demand in demands):
        return 0.0
    import torch

    return float(torch.cuda.device_count())
