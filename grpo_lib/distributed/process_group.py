"""How ranks find each other and wait for each other: a TCP store, a process group on top of it, barriers beside it.

The store is kept after start-up because `torch.distributed.barrier` cannot say who is missing. A barrier here is one
key per rank, so that whoever gives up can name the ranks whose keys are absent.
"""

from __future__ import annotations

import errno
import socket
import threading
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] documented, not in __all__

from grpo_lib.errors import DeadlineExceeded, GrpoError, RankFailure

_START = "process group start"


def free_port(address: str = "127.0.0.1") -> int:
    """A TCP port that is free now. Bind it soon: nothing reserves it."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def host_store(address: str, world_size: int, *, timeout_s: float) -> TCPStore:
    """Rank 0's store on a port that the system chooses: ``store.port``. Nobody else can take it in between."""
    return TCPStore(
        address, 0, world_size, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
    )


class Rendezvous:
    """One rank's view of the store that all ranks share; rank 0 hosts it.

    Args:
        rank: 0 … world_size - 1.
        world_size: Number of ranks.
        address: Address of rank 0 that every rank can reach.
        port: Port that rank 0 listens on.
        timeout_s: Deadline for reaching rank 0.
        port_setting: Config key of the port, for the error when it is taken.
        timeout_setting: Config key of the deadline.
        store: Rank 0's, where `host_store` opened it before; address and port are its.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        address: str,
        port: int,
        timeout_s: float,
        port_setting: str = "weight_sync.port",
        timeout_setting: str = "deadlines.ranks_start_s",
        store: TCPStore | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in 0 … {world_size - 1}")
        self.rank, self.world_size = rank, world_size
        self._rounds: Counter[str] = Counter()
        if store is not None:
            self.store = store
            return
        if rank == 0:
            _check_port_is_free(address, port, port_setting)
        try:
            self.store = _open_store(rank, world_size, address, port, timeout_s)
        except (dist.DistNetworkError, TimeoutError) as error:
            if rank == 0:
                raise GrpoError(f"rank 0 cannot listen on {address}:{port}: {error}; set {port_setting}") from error
            raise DeadlineExceeded(
                stage=_START, waited_for=_missing([0], world_size), deadline_s=timeout_s, setting=timeout_setting
            ) from error

    def barrier(self, name: str, *, deadline_s: float, setting: str = "deadlines.barrier_s") -> None:
        """Wait until every rank has called this with the same name; the n-th call meets the others' n-th call.

        Raises:
            DeadlineExceeded: names the ranks that did not arrive.
            RankFailure: rank 0, which hosts the store, is gone.
        """
        round_key = f"barrier/{name}/{self._rounds[name]}"
        self._rounds[name] += 1
        keys = [f"{round_key}/{rank}" for rank in range(self.world_size)]
        try:
            self.store.set(keys[self.rank], "here")
            self.store.wait(keys, timedelta(seconds=deadline_s))
        except dist.DistNetworkError as error:
            raise RankFailure(f"barrier {name!r}: rank 0, which hosts the store, is gone: {error}") from error
        except dist.DistStoreError as error:
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            raise DeadlineExceeded(
                stage=f"barrier {name!r}",
                waited_for=_missing(missing, self.world_size),
                deadline_s=deadline_s,
                setting=setting,
            ) from error


def init_ranks(
    *,
    rank: int,
    world_size: int,
    address: str,
    port: int,
    backend: str = "gloo",
    timeout_s: float,
    collective_timeout_s: float | None = None,
    port_setting: str = "weight_sync.port",
    timeout_setting: str = "deadlines.ranks_start_s",
    store: TCPStore | None = None,
) -> Rendezvous:
    """Join the default process group; returns the rendezvous whose barriers name missing ranks.

    Args:
        backend: ``"gloo"`` for CPU ranks; ``"nccl"`` for CUDA ranks, which also get gloo for their host tensors.
        timeout_s: Deadline for all ranks to arrive.
        collective_timeout_s: Deadline of every later collective, `timeout_s` when absent. PyTorch's default of half an
            hour would hold all devices that long when one rank dies.
        store: Rank 0's, where `host_store` opened it before; address and port are its.

    Raises:
        GrpoError: the port is taken, or this process already has a process group.
        DeadlineExceeded: names the ranks that did not arrive.
    """
    if dist.is_initialized():
        raise GrpoError(f"rank {rank}: this process already belongs to a process group; run one trainer per process")
    rendezvous = Rendezvous(
        rank=rank,
        world_size=world_size,
        address=address,
        port=port,
        timeout_s=timeout_s,
        port_setting=port_setting,
        timeout_setting=timeout_setting,
        store=store,
    )
    rendezvous.barrier("start", deadline_s=timeout_s, setting=timeout_setting)
    device_id = None
    if backend == "nccl":
        # Ray shows each actor only its own devices, so this rank's device is always the first.
        device_id = torch.device("cuda", 0)
        torch.cuda.set_device(device_id)
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if backend == "nccl" else backend,
        store=rendezvous.store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s if collective_timeout_s is None else collective_timeout_s),
        device_id=device_id,
    )
    return rendezvous


def _open_store(rank: int, world_size: int, address: str, port: int, timeout_s: float) -> TCPStore:
    """Raises TimeoutError when the other side accepts the connection but never answers.

    The store's own timeout covers connecting, not the greeting after it: against a stranger on that port its
    constructor waits for ever, so it runs in a thread that can be left behind.
    """
    outcome: list[TCPStore | Exception] = []

    def connect() -> None:
        try:
            store = TCPStore(
                address,
                port,
                world_size,
                is_master=rank == 0,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
            )
        except dist.DistNetworkError as error:
            outcome.append(error)
        else:
            outcome.append(store)

    thread = threading.Thread(target=connect, name="rendezvous", daemon=True)
    thread.start()
    thread.join(timeout_s + 1)
    if not outcome:
        raise TimeoutError(f"{address}:{port} accepts connections but is not our store")
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def _check_port_is_free(address: str, port: int, port_setting: str) -> None:
    # The store's own message for a taken port names neither the setting nor the remedy.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store does: TIME_WAIT is not "in use"
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise GrpoError(f"cannot listen on {address}:{port}: {error.strerror}; set {port_setting}") from error
            raise GrpoError(
                f"port {port} on {address} is in use by another process; set {port_setting} to a free port, "
                "or to 0 to have one chosen"
            ) from error


def _missing(ranks: Sequence[int], world_size: int) -> str:
    return f"ranks {list(ranks)} of {world_size}"
