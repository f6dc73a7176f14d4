"""A pool of gloo ranks that tests send functions to, so that each process imports torch and OLMo-core once."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing as mp

from grpo_lib.distributed.process_group import free_port, init_ranks

_START_S = 120.0


class RankPool:
    """`num_ranks` processes in one process group; a single rank joins none and makes its own when it needs one."""

    def __init__(self, num_ranks: int) -> None:
        context = mp.get_context("spawn")
        port = free_port()
        self.num_ranks = num_ranks
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, num_ranks, port), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, deadline_s: float = 60.0) -> list[Any]:
        """`function(rank, num_ranks, *args)` on every rank; its results by rank.

        The function is found by name in the rank, so it must live in an importable module. An exception there fails
        the test here, with its traceback.
        """
        for pipe in self._pipes:
            pipe.send((function, args))
        outcomes = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(deadline_s):
                raise TimeoutError(
                    f"rank {rank} of {self.num_ranks} did not finish {function.__name__} in {deadline_s} s"
                )
            outcomes.append(pipe.recv())
        failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(outcomes) if not ok]
        if failures:
            raise AssertionError("\n".join(failures))
        return [result for _, result in outcomes]

    def close(self) -> None:
        """End the ranks; they hold nothing that needs an orderly exit."""
        for process in self._processes:
            process.kill()
            process.join()


def _serve(pipe: Connection, rank: int, num_ranks: int, port: int) -> None:
    torch.set_num_threads(1)
    if num_ranks > 1:
        init_ranks(rank=rank, world_size=num_ranks, address="127.0.0.1", port=port, backend="gloo", timeout_s=_START_S)
    while True:
        function, args = pipe.recv()
        try:
            pipe.send((True, function(rank, num_ranks, *args)))
        except Exception:  # noqa: BLE001 process boundary: the test fails with this traceback
            pipe.send((False, traceback.format_exc()))
