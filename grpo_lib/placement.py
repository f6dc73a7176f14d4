"""How ranks and engines come to lie on GPUs, as far as the configuration decides it; Ray does the placing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpo_lib.config import RunConfig

# Parts of a card's memory that one engine takes by default: beside a rank, and where nobody else is.
SHARED_GPU_SHARE, OWN_GPU_SHARE = 0.25, 0.9


def shares_cards(config: RunConfig) -> bool:
    """Whether ranks and engines may lie on the same GPU."""
    rank, engine = config.runtime.gpus_per_rank, config.runtime.gpus_per_engine
    return rank > 0 and engine > 0 and rank + engine <= 1


def engine_gpu_share(config: RunConfig) -> float:
    """Part of a GPU's memory that one engine takes: `rollout.gpu_memory_share` or its default."""
    if config.rollout.gpu_memory_share is not None:
        return config.rollout.gpu_memory_share
    return SHARED_GPU_SHARE if shares_cards(config) else OWN_GPU_SHARE / engines_per_card(config)


def engines_per_card(config: RunConfig) -> int:
    """Most engines that Ray may place on one GPU, beside a rank where they share cards."""
    beside = config.runtime.gpus_per_rank if shares_cards(config) else 0.0
    return _per_card(config.runtime.gpus_per_engine, config.rollout.num_engines, beside)


def ranks_per_card(config: RunConfig) -> int:
    """Most ranks that Ray may place on one GPU, beside an engine where they share cards."""
    beside = config.runtime.gpus_per_engine if shares_cards(config) else 0.0
    return _per_card(config.runtime.gpus_per_rank, config.trainer.num_ranks, beside)


def _per_card(gpus: float, count: int, beside: float) -> int:
    if gpus == 0:
        return count
    return min(count, max(1, int((1 - beside) / gpus + 1e-9)))  # 0.3 / 0.1 is just below 3
