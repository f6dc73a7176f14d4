"""The trainer's side of a weight push: one `WeightSender` per rank, whatever the backend.

Rank 0 sends and calls the engines through an injected client, in vLLM's calling convention. The other ranks take part
in the gathers only, unless the backend needs a handle from every device (`ipc`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from grpo_lib.algo.checksum import NamedChecksums
from grpo_lib.errors import PreflightError, WeightSyncError
from grpo_lib.interfaces import TrainerBackend
from grpo_lib.types import SenderReport, WeightManifest
from grpo_lib.weight_sync.gloo_channel import BACKEND, GlooSender, WireTensor
from grpo_lib.weight_sync.ipc_channel import IpcSender

if TYPE_CHECKING:
    import torch

_SENDS_FROM_EVERY_RANK = frozenset({"ipc"})


class EngineClient(Protocol):
    """vLLM's `VLLMWeightSyncClient`, plus where rank 0 can be reached. Implemented in `ray_runtime`."""

    @property
    def num_receivers(self) -> int:
        """Engine workers that join the channel."""
        ...

    def sender_address(self) -> str:
        """Address of the calling process that all engines can reach."""
        ...

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...

    def shutdown_weight_transfer_engine(self) -> None: ...


class Channel(Protocol):
    """vLLM's trainer-side engine after its handshake."""

    def send_weights(self) -> None: ...

    def shutdown(self) -> None: ...


OpenChannel = Callable[..., Channel]  # keyword arguments as of `open_backend`


class WeightSender:
    """Sends one rank's trainer weights; all methods are collective over the ranks.

    Args:
        trainer: This rank's trainer.
        backend: ``"cpu_gloo"``, ``"nccl"`` or ``"ipc"``.
        rank: 0 sends.
        open_channel: Only tests replace it.
    """

    def __init__(
        self, trainer: TrainerBackend, *, backend: str, rank: int, open_channel: OpenChannel | None = None
    ) -> None:
        self._trainer, self._backend, self._rank = trainer, backend, rank
        self._open_channel = open_channel or open_backend
        self._weights = CheckedWeights(trainer)
        self._channel: Channel | None = None
        self._connected = False

    @property
    def sends(self) -> bool:
        """Whether this rank talks to vLLM, rather than only taking part in the gathers."""
        return self._rank == 0 or self._backend in _SENDS_FROM_EVERY_RANK

    def connect(self, client: EngineClient | None, *, port: int = 0, timeout_s: float) -> None:
        """Open the channel to all engines, once; `client` may be None on ranks that do not send.

        Args:
            port: Of the rendezvous on rank 0's host; 0 picks a free one.
            timeout_s: Deadline of the handshake and of each later operation on the channel.

        Raises:
            PreflightError: the port is taken.
        """
        if self._connected:
            raise WeightSyncError(f"rank {self._rank} is already connected to the engines")
        if self.sends:
            if client is None:
                raise WeightSyncError(f"rank {self._rank} sends weights over {self._backend} and needs a client")
            check_port(port)
            self._channel = self._open_channel(
                backend=self._backend,
                rank=self._rank,
                client=client,
                weights=self._weights,
                port=port,
                timeout_s=timeout_s,
            )
        self._connected = True

    def push(self, policy_version: int) -> SenderReport:
        """Gather and send all weights; the checksums are those of the tensors that were sent.

        Raises:
            WeightSyncError: not connected, or the trainer is at another version.
        """
        if not self._connected:
            raise WeightSyncError(f"rank {self._rank}: push before connect")
        if self._trainer.policy_version != policy_version:
            raise WeightSyncError(
                f"rank {self._rank} was asked to send version {policy_version}, "
                f"but its trainer is at {self._trainer.policy_version}"
            )
        started = time.perf_counter()
        if self._channel is not None:
            self._channel.send_weights()
            checksums, num_bytes = self._weights.take_record()
        else:
            checksums, num_bytes = {}, 0
            for _bucket in self._trainer.named_weights():
                pass
        return SenderReport(
            policy_version=self._trainer.policy_version,
            checksums=checksums,
            num_bytes=num_bytes,
            seconds=time.perf_counter() - started,
        )

    def close(self) -> None:
        if self._channel is not None:
            self._channel.shutdown()
            self._channel = None


class CheckedWeights:
    """The trainer's weights as (name, tensor) pairs, checked against the manifest and recorded as they go out."""

    def __init__(self, trainer: TrainerBackend) -> None:
        self._trainer = trainer
        self._passed = NamedChecksums()

    def manifest(self) -> WeightManifest:
        return self._trainer.manifest()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A fresh pass; a gather is complete on every rank before its bucket's first tensor is yielded."""
        self._passed = NamedChecksums()
        entries = iter(self.manifest().entries)
        for bucket in self._trainer.named_weights():
            for name, tensor in bucket.tensors:
                entry = next(entries, None)
                found = (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
                if entry is None or found != (entry.name, entry.dtype, entry.shape):
                    raise WeightSyncError(f"the trainer yields {found}, but its manifest has {entry} there")
                if not tensor.is_contiguous():
                    raise WeightSyncError(f"the trainer yields {name} with strides {tensor.stride()}: not contiguous")
            self._passed.add(bucket.tensors)
            yield from bucket.tensors
        if (left := next(entries, None)) is not None:
            raise WeightSyncError(f"the trainer's weights end before {left.name}, which its manifest lists")

    def take_record(self) -> tuple[dict[str, int], int]:
        """(checksum by name, bytes) of the last pass."""
        passed, self._passed = self._passed, NamedChecksums()
        return passed.read(), passed.num_bytes


def check_port(port: int) -> None:
    """Raise `PreflightError` if a port that the user chose is taken; 0 always passes."""
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise PreflightError(
                f"weight_sync.port {port} cannot be used on rank 0's host ({error}); "
                "choose another, or 0 for one that is free"
            ) from error


def open_backend(
    *, backend: str, rank: int, client: EngineClient, weights: CheckedWeights, port: int, timeout_s: float
) -> Channel:
    """The channel of the configured backend; only `nccl` imports vLLM."""

    def announced() -> list[WireTensor]:
        return [WireTensor.parse(entry.name, entry.dtype, entry.shape) for entry in weights.manifest().entries]

    if backend == "ipc":
        return IpcSender(client=client, announced=announced(), weights=weights, rank=rank)
    if backend == BACKEND:
        return GlooSender(
            client=client,
            announced=announced,
            weights=weights,
            address=client.sender_address(),
            port=port,
            num_receivers=client.num_receivers,
            timeout_s=timeout_s,
        )
    if backend == "nccl":
        from grpo_lib.weight_sync.transfer_backends import open_nccl

        return open_nccl(rank=rank, client=client, weights=weights, port=port)
    raise ValueError(f"weight_sync.backend {backend!r} is none of cpu_gloo, nccl, ipc")
