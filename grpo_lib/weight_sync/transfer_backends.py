"""vLLM's own trainer-side engine of `nccl` behind the one form that `WeightSender` uses.

vLLM 0.32 builds it with `WeightTransferTrainerFactory.trainer_init`. vLLM 0.26 has only a stateless sender for it;
`StatelessSender` gives it the same form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from vllm.distributed.weight_transfer import nccl_engine
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


def open_nccl(*, rank: int, client: EngineClient, weights: CheckedWeights, port: int) -> Channel:
    """Shake hands with all engines; `port` 0 picks one.

    NCCL has no deadline of its own: the driver's ends a push that hangs.
    """
    source = ManifestSource(weights)
    rendezvous = {
        "master_address": client.sender_address(),
        "master_port": port or free_port(),
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
        send=lambda pairs: engine.trainer_send_weights(pairs, {"group": group, "packed": True}),
        announcement={"packed": True},
        synchronize=torch.cuda.synchronize,
    )


class StatelessSender:
    """vLLM 0.26's static sender with the rest of the round trip around it.

    Args:
        send: Sends all (name, tensor) pairs, which the engines receive while it runs.
        announcement: Fields of the update info beside names, dtypes and shapes.
        synchronize: Waits for the device.
    """

    def __init__(
        self,
        *,
        client: EngineClient,
        source: WeightSource,
        send: Callable[[Iterator[tuple[str, torch.Tensor]]], None],
        announcement: dict[str, Any],
        synchronize: Callable[[], None],
    ) -> None:
        self._client, self._source = client, source
        self._send, self._announcement, self._synchronize = send, announcement, synchronize

    def send_weights(self) -> None:
        metadata = self._source.metadata()
        update_info = self._announcement | {
            "names": [meta.name for meta in metadata],
            "dtype_names": [str(meta.dtype).removeprefix("torch.") for meta in metadata],
            "shapes": [list(meta.shape) for meta in metadata],
        }
        self._client.start_weight_update()
        receiving = _in_background(self._client.update_weights, update_info)
        self._send(iter(self._source))
        receiving()
        self._synchronize()
        self._client.finish_weight_update()

    def shutdown(self) -> None:
        """vLLM 0.26 frees its communicator with the last reference."""


def _in_background(function: Callable[[dict[str, Any]], Any], argument: dict[str, Any]) -> Callable[[], Any]:
    """Call beside the caller's own part of a collective; the returned function waits for it and raises its error."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="weight-transfer")
    future = executor.submit(function, argument)
    executor.shutdown(wait=False)
    return future.result
