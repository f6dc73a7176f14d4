"""The `cpu_gloo` wire: whole tensors as raw bytes, in chunks of bounded size, broadcast from rank 0 over gloo.

Both sides cut the same chunks from the same names, shapes and dtypes, so only bytes cross the wire. Nothing here needs
vLLM, so that a trainer on CPUs sends weights without importing it (9 CPU-seconds and 300 MB per process).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage] documented API

from grpo_lib.errors import WeightSyncError

BACKEND = "cpu_gloo"
SENDER_RANK = 0
_CHUNK_BYTES = 64 * 2**20
_ALIGNMENT = 16  # bytes; every dtype's view of a chunk starts at a multiple of its size
_POLL_S = 0.0005


@dataclass(frozen=True, slots=True, kw_only=True)
class WireTensor:
    """A tensor as announced: what the receiver needs in order to read it out of a chunk."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @staticmethod
    def parse(name: str, dtype_name: str, shape: Sequence[int]) -> WireTensor:
        return WireTensor(name=name, dtype=getattr(torch, dtype_name), shape=tuple(shape))

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class GlooChannel:
    """One member of the group; rank 0 sends, the others receive."""

    def __init__(self, store: TCPStore, rank: int, world_size: int, timeout: timedelta) -> None:
        """Join; returns when all members have, or raises at the timeout, which also bounds each later broadcast."""
        self._timeout = timeout
        self._store = store  # keeps rank 0's server alive
        try:
            # Typed loosely: torch's stubs leave out what this class inherits.
            self._group: Any = dist.ProcessGroupGloo(PrefixStore(BACKEND, store), rank, world_size, timeout)
        except (RuntimeError, dist.DistError) as error:
            raise WeightSyncError(
                f"{BACKEND}: rank {rank} of {world_size} could not join within {timeout.total_seconds():g} s: {error}; "
                "look at the other members' logs, or raise deadlines.weight_sync_s if they were only slow"
            ) from error

    def send(
        self, announced: Sequence[WireTensor], tensors: Iterable[tuple[str, torch.Tensor]], receiving: Future[None]
    ) -> None:
        """Broadcast the tensors; ends early with the receivers' error if `receiving` fails.

        Raises:
            WeightSyncError: the tensors are not the announced ones, or a broadcast failed or timed out.
        """
        pending = iter(tensors)
        for chunk in _chunks(announced):
            buffer = torch.empty(_chunk_bytes(chunk), dtype=torch.uint8)
            for wire, view in _views(chunk, buffer):
                name, tensor = next(pending, ("nothing", torch.empty(0)))
                if (name, tensor.dtype, tuple(tensor.shape)) != (wire.name, wire.dtype, wire.shape):
                    raise WeightSyncError(f"announced {wire}, but got {name} {tensor.dtype} {tuple(tensor.shape)}")
                view.copy_(tensor.detach())
            self._broadcast(buffer, chunk, receiving)
        if (extra := next(pending, None)) is not None:
            raise WeightSyncError(f"the trainer yields {extra[0]}, which it did not announce")

    def receive(self, announced: Sequence[WireTensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors as they arrive; each chunk has memory of its own, because the model may keep views of it."""
        for chunk in _chunks(announced):
            buffer = torch.empty(_chunk_bytes(chunk), dtype=torch.uint8)
            self._broadcast(buffer, chunk)
            for wire, view in _views(chunk, buffer):
                yield wire.name, view

    def _broadcast(
        self, buffer: torch.Tensor, chunk: Sequence[WireTensor], receiving: Future[None] | None = None
    ) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = SENDER_RANK, 0
        with self._explained(chunk, buffer.numel()):
            work = self._group.broadcast([buffer], options)
        while receiving is not None and not work.is_completed():
            if receiving.done():
                receiving.result()  # raises if the receivers gave up
            time.sleep(_POLL_S)
        with self._explained(chunk, buffer.numel()):
            work.wait()

    @contextmanager
    def _explained(self, chunk: Sequence[WireTensor], num_bytes: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise WeightSyncError(
                f"{BACKEND}: the broadcast of {chunk[0].name} … {chunk[-1].name} ({num_bytes} bytes) failed "
                f"within {self._timeout.total_seconds():g} s: {error}; look at the other side's log, or raise "
                "deadlines.weight_sync_s if it was only slow"
            ) from error


class GlooSender:
    """Rank 0's side of the handshake and of each update, in vLLM's calling convention.

    Args:
        client: vLLM's `VLLMWeightSyncClient`: how to call all engines.
        announced: What each pass over `weights` yields, read anew for each update.
        weights: (name, tensor) pairs; a fresh pass each time it is iterated.
    """

    def __init__(
        self,
        *,
        client: Any,
        announced: Callable[[], Sequence[WireTensor]],
        weights: Iterable[tuple[str, torch.Tensor]],
        address: str,
        port: int,
        num_receivers: int,
        timeout_s: float,
    ) -> None:
        """Open the channel with all receivers; port 0 lets the kernel choose, so that nobody can take it first."""
        self._client, self._announced, self._weights = client, announced, weights
        timeout = timedelta(seconds=timeout_s)
        world_size = 1 + num_receivers
        store = TCPStore(address, port, is_master=True, timeout=timeout, wait_for_workers=False)
        worker_info = {
            "master_address": address,
            "master_port": store.port,
            "rank_offset": SENDER_RANK + 1,
            "world_size": world_size,
            "timeout_s": timeout_s,
        }
        # Workers block in this call until everybody has joined, so it runs beside our own joining.
        joining = _in_background(client.init_weight_transfer_engine, worker_info)
        self._channel = GlooChannel(store, SENDER_RANK, world_size, timeout)
        joining.result()

    def send_weights(self) -> None:
        announced = self._announced()
        update_info = {
            "names": [wire.name for wire in announced],
            "dtype_names": [str(wire.dtype).removeprefix("torch.") for wire in announced],
            "shapes": [list(wire.shape) for wire in announced],
        }
        self._client.start_weight_update()
        receiving = _in_background(self._client.update_weights, update_info)
        self._channel.send(announced, self._weights, receiving)
        receiving.result()
        self._client.finish_weight_update()

    def shutdown(self) -> None:
        """The group ends with its last reference; there is nothing to wait for."""


def _chunks(announced: Sequence[WireTensor]) -> Iterator[list[WireTensor]]:
    """Runs of tensors of at most `_CHUNK_BYTES`; a larger tensor is a chunk of its own."""
    chunk: list[WireTensor] = []
    size = 0
    for wire in announced:
        padded = _padded(wire.num_bytes)
        if chunk and size + padded > _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(wire)
        size += padded
    if chunk:
        yield chunk


def _chunk_bytes(chunk: Sequence[WireTensor]) -> int:
    return sum(_padded(wire.num_bytes) for wire in chunk)


def _views(chunk: Sequence[WireTensor], buffer: torch.Tensor) -> Iterator[tuple[WireTensor, torch.Tensor]]:
    """Each tensor's own part of the chunk, in its dtype and shape."""
    start = 0
    for wire in chunk:
        yield wire, buffer[start : start + wire.num_bytes].view(wire.dtype).view(wire.shape)
        start += _padded(wire.num_bytes)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _in_background(function: Callable[[dict[str, Any]], Any], argument: dict[str, Any]) -> Future[None]:
    """Call in a thread that nobody has to join: after a failure the call may return only at its own deadline."""
    executor = ThreadPoolExecutor(1, thread_name_prefix=BACKEND)
    future = executor.submit(function, argument)
    executor.shutdown(wait=False)
    return future
