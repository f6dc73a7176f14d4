"""What the ranks of any backend do together: belong to a process group, and fail as one."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage] documented, not in __all__

from grpo_lib.errors import NonFiniteLogprobs


def ensure_group(device: torch.device, rank: int, world_size: int) -> None:
    """Check that this process is that rank of the default process group, which one rank makes for itself.

    Raises:
        ValueError: the process group is missing or another one.
    """
    if not dist.is_initialized() and world_size == 1:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    if not dist.is_initialized() or (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
        found = f"rank {dist.get_rank()} of {dist.get_world_size()}" if dist.is_initialized() else "no process group"
        raise ValueError(f"trainer rank {rank} of {world_size} needs a process group to match, found {found}")


def failures_of_ranks(failure: str | None, device: torch.device) -> NonFiniteLogprobs | None:
    """What every rank must raise when any rank failed, so that none is left waiting in the next collective."""
    if dist.get_world_size() == 1:
        return None if failure is None else NonFiniteLogprobs(f"rank 0: {failure}")
    any_failed = torch.tensor(failure is not None, dtype=torch.int32, device=device)
    dist.all_reduce(any_failed, dist.ReduceOp.MAX)
    if not any_failed:
        return None
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    return NonFiniteLogprobs("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(failures) if text))
