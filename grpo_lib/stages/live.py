"""The live parts of a run: who starts what, in which order, and who shuts it down.

Ranks and engines start side by side. Everything started in a `with` block of this file is stopped at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from grpo_lib.config import RunConfig
from grpo_lib.data.models import inspect_model
from grpo_lib.derived import engine_memory
from grpo_lib.pipeline import sampling_params
from grpo_lib.placement import engine_gpu_share
from grpo_lib.ray_runtime.actor_group import ActorGroup, Pending
from grpo_lib.ray_runtime.cluster import ResourceDemand, local_cluster
from grpo_lib.ray_runtime.engine_group import EngineGroup, engine_actors
from grpo_lib.ray_runtime.trainer_group import RayTrainerGroup
from grpo_lib.rollout.options import GpuBudget
from grpo_lib.rollout.vllm_engine import VllmEngine
from grpo_lib.stages.scorers import score_packed
from grpo_lib.stages.trainer_rank import TrainerRankFactory
from grpo_lib.types import Prompt
from grpo_lib.weight_sync.canary import DecodeCanary
from grpo_lib.weight_sync.sync import CertifiedWeightSync

_RANKS_START = "deadlines.ranks_start_s"
_ENGINE_START = "deadlines.engine_start_s"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """Trainer, engines and the connected channel between them; nothing is pushed yet."""

    trainer: RayTrainerGroup
    engines: EngineGroup
    sync: CertifiedWeightSync

    @property
    def processes(self) -> dict[str, int]:
        """Process id by rank and engine, each on its own machine."""
        return self.trainer.processes | self.engines.processes


@contextmanager
def live_run(
    config: RunConfig,
    *,
    model_path: Path,
    canary_prompts: Sequence[Prompt],
    stop_token_ids: Sequence[int],
    checkpoint: Path | None,
) -> Iterator[LiveRun]:
    """Trainer ranks and engines, started together and connected.

    Args:
        model_path: Base model of both.
        checkpoint: Where the trainer continues; None is the base model.
    """
    with live_parts(
        config, trainer_model=model_path, engine_model=model_path, checkpoint=checkpoint, engine_version=0
    ) as (trainer, engines):
        sync = CertifiedWeightSync(
            ranks=trainer,
            engines=engines,
            config=config.weight_sync,
            deadlines=config.deadlines,
            canary=_canary(config, trainer, engines, canary_prompts, stop_token_ids),
        )
        sync.connect()
        yield LiveRun(trainer=trainer, engines=engines, sync=sync)


@contextmanager
def live_parts(
    config: RunConfig, *, trainer_model: Path, engine_model: Path, checkpoint: Path | None, engine_version: int
) -> Iterator[tuple[RayTrainerGroup, EngineGroup]]:
    """Trainer ranks and engines, started together and not connected.

    Args:
        engine_version: Policy version of the weights in `engine_model`.
    """
    with ExitStack() as stack:
        stack.enter_context(local_cluster(config.runtime, demands=[_rank_demand(config), _engine_demand(config)]))
        rank_group = stack.enter_context(_launched(_rank_group(config, trainer_model, checkpoint)))
        engine_group = stack.enter_context(_launched(_engine_group(config, engine_model, engine_version)))
        setup = _begin_setup(rank_group, config)
        engine_group.wait_ready(deadline_s=config.deadlines.engine_start_s, setting=_ENGINE_START)
        setup.wait(deadline_s=config.deadlines.ranks_start_s, setting=_RANKS_START)
        yield _trainer(rank_group, config), _engines(engine_group, config)


@contextmanager
def live_trainer(
    config: RunConfig, *, model_path: Path, checkpoint: Path | None = None
) -> Iterator[tuple[RayTrainerGroup, ActorGroup]]:
    """Trainer ranks alone, with the group that hosts them."""
    with (
        local_cluster(config.runtime, demands=[_rank_demand(config)]),
        _launched(_rank_group(config, model_path, checkpoint)) as group,
    ):
        _begin_setup(group, config).wait(deadline_s=config.deadlines.ranks_start_s, setting=_RANKS_START)
        yield _trainer(group, config), group


@contextmanager
def live_trainers(configs: Sequence[RunConfig], *, model_path: Path) -> Iterator[tuple[RayTrainerGroup, ...]]:
    """Several trainers side by side in one cluster, all from the base model: one for each configuration.

    Args:
        configs: Alike in `runtime` and `deadlines`, of which the first one's hold for the cluster.
    """
    with ExitStack() as stack:
        stack.enter_context(local_cluster(configs[0].runtime, demands=[_rank_demand(config) for config in configs]))
        groups = [stack.enter_context(_launched(_rank_group(config, model_path, None))) for config in configs]
        setups = [_begin_setup(group, config) for group, config in zip(groups, configs, strict=True)]
        for setup, config in zip(setups, configs, strict=True):
            setup.wait(deadline_s=config.deadlines.ranks_start_s, setting=_RANKS_START)
        yield tuple(_trainer(group, config) for group, config in zip(groups, configs, strict=True))


@contextmanager
def live_engines(config: RunConfig, *, model_path: Path, policy_version: int) -> Iterator[EngineGroup]:
    """Engines alone, holding the folder's weights under `policy_version`."""
    with (
        local_cluster(config.runtime, demands=[_engine_demand(config)]),
        _launched(_engine_group(config, model_path, policy_version)) as group,
    ):
        group.wait_ready(deadline_s=config.deadlines.engine_start_s, setting=_ENGINE_START)
        yield _engines(group, config)


@contextmanager
def _launched(group: ActorGroup) -> Iterator[ActorGroup]:
    try:
        group.launch()
        yield group
    finally:
        group.close()


def _rank_demand(config: RunConfig) -> ResourceDemand:
    runtime = config.runtime
    return ResourceDemand(
        name=_rank_name(config), count=config.trainer.num_ranks, cpus=runtime.cpus_per_rank, gpus=runtime.gpus_per_rank
    )


def _rank_name(config: RunConfig) -> str:
    """How messages call a rank; the backend tells two trainers in one cluster apart."""
    return f"{config.trainer.backend} trainer rank"


def _engine_demand(config: RunConfig) -> ResourceDemand:
    runtime = config.runtime
    return ResourceDemand(
        name="engine", count=config.rollout.num_engines, cpus=runtime.cpus_per_engine, gpus=runtime.gpus_per_engine
    )


def _rank_group(config: RunConfig, model_path: Path, checkpoint: Path | None) -> ActorGroup:
    return ActorGroup(
        _rank_name(config),
        [
            TrainerRankFactory(config=config, model_path=model_path, rank=rank, checkpoint=checkpoint)
            for rank in range(config.trainer.num_ranks)
        ],
        num_cpus=config.runtime.cpus_per_rank,
        num_gpus=config.runtime.gpus_per_rank,
        env_vars=_threads(config),
        placement_deadline_s=config.deadlines.placement_s,
    )


def _begin_setup(group: ActorGroup, config: RunConfig) -> Pending:
    """Tell every rank where rank 0 listens; loading the model goes on in the background."""
    deadline_s = config.deadlines.ranks_start_s
    group.wait_ready(deadline_s=deadline_s, setting=_RANKS_START)
    address, port = group.call_one(0, "listen_address", deadline_s=deadline_s, setting=_RANKS_START)
    return group.begin("setup", address, port)


def _trainer(group: ActorGroup, config: RunConfig) -> RayTrainerGroup:
    return RayTrainerGroup(
        group,
        name=config.trainer.backend,
        deadlines=config.deadlines,
        has_reference=config.algorithm.kl_beta > 0,
    )


def engine_factory(config: RunConfig, model_path: Path, *, policy_version: int, index: int) -> Callable[[], VllmEngine]:
    """Picklable recipe of one engine; the process that calls it hosts the engine."""
    gpu = None
    if config.runtime.gpus_per_engine > 0:
        fixed_bytes = engine_memory(config, inspect_model(model_path)).device
        gpu = GpuBudget(share=engine_gpu_share(config), fixed_bytes=fixed_bytes)
    return partial(
        VllmEngine,
        model_path=model_path,
        config=config.rollout,
        dtype=config.model.dtype,
        transfer_backend=config.weight_sync.backend,
        max_model_len=config.data.max_prompt_tokens + config.rollout.max_tokens,
        policy_version=policy_version,
        threads=config.runtime.threads_per_process,
        name=f"engine {index}",
        fp32_head=config.model.fp32_head,
        gpu=gpu,
    )


def _engine_group(config: RunConfig, model_path: Path, policy_version: int) -> ActorGroup:
    return engine_actors(
        [
            engine_factory(config, model_path, policy_version=policy_version, index=index)
            for index in range(config.rollout.num_engines)
        ],
        num_cpus=config.runtime.cpus_per_engine,
        num_gpus=config.runtime.gpus_per_engine,
        env_vars=_threads(config),
        placement_deadline_s=config.deadlines.placement_s,
    )


def _engines(group: ActorGroup, config: RunConfig) -> EngineGroup:
    return EngineGroup(group, deadlines=config.deadlines, workers_per_engine=config.rollout.tensor_parallel_size)


def _threads(config: RunConfig) -> dict[str, str]:
    """Read by the math libraries when they load; two cores are soon oversubscribed."""
    count = str(config.runtime.threads_per_process)
    return {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "TOKENIZERS_PARALLELISM": "false"}


def _canary(
    config: RunConfig,
    trainer: RayTrainerGroup,
    engines: EngineGroup,
    prompts: Sequence[Prompt],
    stop_token_ids: Sequence[int],
) -> DecodeCanary:
    def score(pairs: Sequence[tuple[tuple[int, ...], np.ndarray]]) -> list[np.ndarray]:
        documents = {f"canary/{index}": pair for index, pair in enumerate(pairs)}
        return list(score_packed(trainer, documents, config.trainer).values())

    return DecodeCanary(
        prompts=[prompt.token_ids for prompt in prompts[: config.weight_sync.canary_prompts]],
        sampling=sampling_params(config, stop_token_ids),
        decode=engines.decode_everywhere,
        score=score,
        tolerance=config.weight_sync.canary_tolerance,
    )
