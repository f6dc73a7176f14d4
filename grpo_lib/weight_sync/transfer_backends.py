"""vLLM's own trainer-side engines (`nccl`, `ipc`) behind the one form that `WeightSender` uses.

vLLM 0.32 builds them with `WeightTransferTrainerFactory.trainer_init`. vLLM 0.26 has only stateless senders for these
two backends; `StatelessSender` gives them the same form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import torch
from vllm.distributed.weight_transfer import ipc_engine, nccl_engine
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from grpo_lib.distributed.process_group import free_port
from grpo_lib.weight_sync.sender import Channel, CheckedWeights, EngineClient


class ManifestSource(WeightSource):
    """The trainer's checked weights as vLLM's trainer engines want them."""

    def __init__(self, weights: CheckedWeights) -> None:
        self._weights = weights

    def metadata(self) -> list[ParamMeta]:
        return [
            ParamMeta(name=entry.name, dtype=getattr(torch, entry.dtype), shape=entry.shape)
            for entry in self._weights.manifest().entries
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._weights)


def open_channel(
    *, backend: str, rank: int, client: EngineClient, weights: CheckedWeights, port: int, timeout_s: float
) -> Channel:
    """Shake hands with all engines over `nccl` or `ipc`.

    `timeout_s` does not reach NCCL, which has no such setting: the driver's own deadline ends a push that hangs.
    """
    source = ManifestSource(weights)
    if backend == "nccl":
        return _open_nccl(rank, client, source, port or free_port())
    if backend == "ipc":
        return _open_ipc(rank, client, source)
    raise ValueError(f"weight_sync.backend {backend!r} is none of cpu_gloo, nccl, ipc")


def _open_nccl(rank: int, client: EngineClient, source: WeightSource, port: int) -> Channel:
    rendezvous = {
        "master_address": client.sender_address(),
        "master_port": port,
        "world_size": 1 + client.num_receivers,
    }
    if hasattr(nccl_engine, "NCCLTrainerInitInfo"):
        info = nccl_engine.NCCLTrainerInitInfo(rank=rank, **rendezvous)
        return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
    engine: Any = nccl_engine.NCCLWeightTransferEngine
    joining = _in_background(client.init_weight_transfer_engine, rendezvous | {"rank_offset": 1})
    group = engine.trainer_init(rendezvous)
    joining()
    return StatelessSender(
        client=client,
        source=source,
        is_sender=rank == 0,
        send=lambda pairs: engine.trainer_send_weights(pairs, {"group": group, "packed": True}),
        announcement={"packed": True},
        synchronize=torch.cuda.synchronize,
    )


def _open_ipc(rank: int, client: EngineClient, source: WeightSource) -> Channel:
    if hasattr(ipc_engine, "IPCTrainerInitInfo"):
        info = ipc_engine.IPCTrainerInitInfo(rank=rank)
        return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
    engine: Any = ipc_engine.IPCWeightTransferEngine
    if rank == 0:
        client.init_weight_transfer_engine({})

    def ship(update_info: Any) -> None:
        client.update_weights(asdict(update_info))

    return StatelessSender(
        client=client,
        source=source,
        is_sender=rank == 0,
        send=lambda pairs: engine.trainer_send_weights(pairs, {"send_mode": ship}),
        announcement=None,
        synchronize=torch.cuda.synchronize,
    )


class StatelessSender:
    """One of vLLM 0.26's static senders with the rest of the round trip around it.

    Args:
        send: Sends all (name, tensor) pairs; called on every rank that has this object.
        announcement: Fields of the update info beside names, dtypes and shapes, for a backend whose receivers must be
            told first and receive while `send` runs; None where `send` calls `update_weights` itself.
        synchronize: Waits for the device.
    """

    def __init__(
        self,
        *,
        client: EngineClient,
        source: WeightSource,
        is_sender: bool,
        send: Callable[[Iterator[tuple[str, torch.Tensor]]], None],
        announcement: dict[str, Any] | None,
        synchronize: Callable[[], None],
    ) -> None:
        self._client, self._source, self._is_sender = client, source, is_sender
        self._send, self._announcement, self._synchronize = send, announcement, synchronize

    def send_weights(self) -> None:
        if not self._is_sender:
            self._send(iter(self._source))
            self._synchronize()
            return
        self._client.start_weight_update()
        if self._announcement is None:
            self._send(iter(self._source))
        else:
            receiving = _in_background(self._client.update_weights, self._update_info(self._announcement))
            self._send(iter(self._source))
            receiving()
        self._synchronize()
        self._client.finish_weight_update()

    def shutdown(self) -> None:
        """vLLM 0.26 frees its communicator with the last reference."""

    def _update_info(self, announcement: dict[str, Any]) -> dict[str, Any]:
        metadata = self._source.metadata()
        return announcement | {
            "names": [meta.name for meta in metadata],
            "dtype_names": [str(meta.dtype).removeprefix("torch.") for meta in metadata],
            "shapes": [list(meta.shape) for meta in metadata],
        }


def _in_background(function: Callable[[dict[str, Any]], Any], argument: dict[str, Any]) -> Callable[[], Any]:
    """Call beside the caller's own part of a collective; the returned function waits for it and raises its error."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="weight-transfer")
    future = executor.submit(function, argument)
    executor.shutdown(wait=False)
    return future.result
