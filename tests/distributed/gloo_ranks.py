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
        self.num_ranks = num_ranks
        self._start()

    def _start(self) -> None:
        context = mp.get_context("spawn")
        port = free_port()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(self.num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self.num_ranks, port), daemon=True)
            process.start()
            theirs.close()  # or a rank's death would leave `run` waiting for its deadline
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, deadline_s: float = 60.0) -> list[Any]:
        """`function(rank, num_ranks, *args)` on every rank; its results by rank.

        The function is found by name in the rank, so it must live in an importable module. An exception there fails
        the test here, with its traceback. Ranks that run over the deadline or die are replaced by new ones: a later
        test must neither get an earlier one's results nor wait for a rank that hangs.
        """
        for pipe in self._pipes:
            pipe.send((function, args))
        outcomes = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(deadline_s):
                self._restart()
                raise TimeoutError(
                    f"rank {rank} of {self.num_ranks} did not finish {function.__name__} in {deadline_s} s"
                )
            try:
                outcomes.append(pipe.recv())
            except EOFError as error:
                self._restart()
                raise RuntimeError(f"rank {rank} of {self.num_ranks} died in {function.__name__}") from error
        failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(outcomes) if not ok]
        if failures:
            raise AssertionError("\n".join(failures))
        return [result for _, result in outcomes]

    def close(self) -> None:
        """End the ranks; they hold nothing that needs an orderly exit."""
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()

    def _restart(self) -> None:
        self.close()
        self._start()


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
