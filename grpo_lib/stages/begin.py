"""`start`: one frozen config, where it comes from, and whether this machine can hold it. No process is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lib.config import RunConfig, config_hash, resolve
from grpo_lib.data.models import inspect_model, resolve_model_path
from grpo_lib.preflight import PreflightResult, pool_machine, run_preflight
from grpo_lib.stages.lineage import lineage
from grpo_lib.stages.run_paths import RunPaths
from grpo_lib.stages.store_check import store_check
from grpo_lib.stages.stored_run import write_run


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


def check(config: RunConfig, *, pool: Mapping[str, Any] | None = None, steps_use_store: bool = True) -> RunSetup:
    """The setup of a configuration that is already resolved; arguments and errors as for `run`.

    Args:
        steps_use_store: A remote store takes the place of a shared disk between the flow's steps.
    """
    model = resolve_model_path(config.model.path)
    machine = None if pool is None else pool_machine(pool)
    preflight = run_preflight(
        config,
        inspect_model(model),
        root=Path(config.storage.root),
        machine=machine,
        more=[store_check(config, pool=pool, by_store=steps_use_store)],
    )
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
