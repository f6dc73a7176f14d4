"""The vLLM plugin of this project's weight-transfer backends, and the engine side of `cpu_gloo`.

vLLM loads this module (entry point `vllm.general_plugins`) in every process that may receive weights. The trainer side
of this project uses `gloo_channel` without it; `GlooTrainerEngine` is for trainers written against vLLM's own factory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] documented API
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

from grpo_lib.errors import WeightSyncError
from grpo_lib.weight_sync.gloo_channel import BACKEND, GlooChannel, GlooSender, WireTensor
from grpo_lib.weight_sync.ipc_channel import VLLM_BACKEND
from grpo_lib.weight_sync.ipc_transfer import IpcReceiver


def register() -> None:
    """Make `cpu_gloo` and `cuda_ipc` known to vLLM's factories; doing it again changes nothing."""
    with suppress(ValueError):  # vLLM's answer to a name that it knows already
        WeightTransferEngineFactory.register_engine(BACKEND, GlooReceiver)
    with suppress(ValueError):
        WeightTransferEngineFactory.register_engine(VLLM_BACKEND, IpcReceiver)
    with suppress(ValueError):
        WeightTransferTrainerFactory.register_engine(BACKEND, GlooTrainerEngine)


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """What a worker needs to join: rank 0's store, its own place, and the deadline of every operation."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    timeout_s: float


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """The tensors of one update in the order they are sent."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooReceiver(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """The worker's side: receives chunks and feeds them to the model through vLLM's layerwise reload."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    _channel: GlooChannel | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        timeout = timedelta(seconds=init_info.timeout_s)
        store = TCPStore(init_info.master_address, init_info.master_port, is_master=False, timeout=timeout)
        self._channel = GlooChannel(store, rank, init_info.world_size, timeout)

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        if self._channel is None:
            raise WeightSyncError(f"{BACKEND}: update_weights before init_weight_transfer_engine")
        fields = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        load_weights: Any = self.model.load_weights  # every vLLM model has it, but torch's Module does not declare it
        load_weights(self._channel.receive([WireTensor.parse(*field) for field in fields]))

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self._channel = None

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """The stateless sender that vLLM 0.26 declares abstract; sending here needs the joined channel."""
        raise NotImplementedError(f"{BACKEND} sends through WeightTransferTrainerFactory.trainer_init()")


@dataclass
class GlooTrainerInitInfo(TrainerInitInfo):
    """What a trainer rank needs; `world_size` counts rank 0 and all engine workers. Port 0 lets the kernel choose."""

    backend: ClassVar[str] = BACKEND

    master_address: str
    master_port: int
    world_size: int
    timeout_s: float


class GlooTrainerEngine(TrainerWeightTransferEngine):  # generic over one type in vLLM 0.32, over two in 0.26
    """`GlooSender` as vLLM's trainer factory builds it. Ranks other than 0 only take part in the gathers."""

    init_info_cls = GlooTrainerInitInfo

    def __init__(self, *, client: VLLMWeightSyncClient, source: WeightSource, is_sender: bool) -> None:
        # The base class's constructor takes other arguments in vLLM 0.26 than in 0.32; these are all it sets.
        self.client, self.source, self.is_sender = client, source, is_sender
        self._sender: GlooSender | None = None

    @classmethod
    def trainer_init(
        cls,
        init_info: GlooTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
        config: object = None,
    ) -> GlooTrainerEngine:
        """Open the channel with all workers; `config` is passed by vLLM 0.26 only, and not needed."""
        if source is None:
            raise ValueError(f"{BACKEND} sends whole models and needs a WeightSource")
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        if engine.is_sender:
            engine._sender = GlooSender(
                client=client,
                announced=lambda: [
                    WireTensor(name=meta.name, dtype=meta.dtype, shape=tuple(meta.shape)) for meta in source.metadata()
                ],
                weights=source,
                address=init_info.master_address,
                port=init_info.master_port,
                num_receivers=init_info.world_size - 1,
                timeout_s=init_info.timeout_s,
            )
        return engine

    def send_weights(self) -> None:
        if self._sender is not None:
            self._sender.send_weights()
            return
        assert self.source is not None  # trainer_init requires it
        for _ in self.source:
            pass
