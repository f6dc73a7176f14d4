"""The engine worker's side of the `ipc` wire, as vLLM's weight-transfer engine `cuda_ipc`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from grpo_lib.errors import WeightSyncError
from grpo_lib.weight_sync.gloo_channel import WireTensor
from grpo_lib.weight_sync.ipc_channel import VLLM_BACKEND, card_of

_DEVICE_ARGUMENT = 6  # of `rebuild_cuda_tensor`: the sender's index of the card


@dataclass
class IpcInitInfo(WeightTransferInitInfo):
    """The staging areas, each as card → arguments of `rebuild_cuda_tensor`."""

    areas: list[dict[str, tuple[Any, ...]]]


@dataclass
class IpcUpdateInfo(WeightTransferUpdateInfo):
    """What lies in one area, and from which byte on."""

    area: int
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    starts: list[int]


class IpcReceiver(WeightTransferEngine[IpcInitInfo, IpcUpdateInfo]):
    """Loads from the sender's memory, straight into the model's parameters where those are what their loaders fill.

    vLLM's layerwise reload, the general way, loads every layer into new memory, processes it there and copies the
    result to the memory that its graphs know. A layer without processing needs none of that.
    """

    init_info_cls = IpcInitInfo
    update_info_cls = IpcUpdateInfo
    _areas: tuple[torch.Tensor, ...] = ()
    _memory: dict[str, int] | None = None  # parameter → address, while they are filled in place

    def init_transfer_engine(self, init_info: IpcInitInfo) -> None:
        self._areas = tuple(self._open(area) for area in init_info.areas)

    def _open(self, area: dict[str, tuple[Any, ...]]) -> torch.Tensor:
        card = card_of(self.device)
        if card not in area:
            raise WeightSyncError(
                f"{VLLM_BACKEND}: no trainer rank shares card {card} with this engine (ranks are on {sorted(area)}); "
                "give ranks and engines the same cards, or set weight_sync.backend=nccl"
            )
        arguments = list(area[card])
        arguments[_DEVICE_ARGUMENT] = self.device.index
        return rebuild_cuda_tensor(*arguments)

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if is_filled_in_place(self.model):
            self._memory = _addresses(self.model)
        else:
            initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: IpcUpdateInfo) -> None:
        if not self._areas:
            raise WeightSyncError(f"{VLLM_BACKEND}: update_weights before init_weight_transfer_engine")
        weights = list(self._tensors(update_info))
        if self._memory is None:
            # The reload keeps tensors until their layer is complete, and the sender reuses the area before that.
            weights = [(name, tensor.clone()) for name, tensor in weights]
        load_weights: Any = self.model.load_weights  # every vLLM model has it, but torch's Module does not declare it
        load_weights(weights)
        if self._areas[0].is_cuda:  # the sender reuses the area once this has returned
            torch.cuda.current_stream(self.device).synchronize()

    def _tensors(self, info: IpcUpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        area = self._areas[info.area]
        columns = zip(info.names, info.dtype_names, info.shapes, info.starts, strict=True)
        for name, dtype_name, shape, start in columns:
            wire = WireTensor.parse(name, dtype_name, shape)
            if start + wire.num_bytes > area.numel():
                raise WeightSyncError(f"{VLLM_BACKEND}: {wire} at {start} ends beyond the area's {area.numel()} bytes")
            yield wire.name, area[start : start + wire.num_bytes].view(wire.dtype).view(wire.shape)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        before, self._memory = self._memory, None
        if before is None:
            finalize_layerwise_reload(self.model, self.model_config)
        elif moved := sorted(name for name, address in _addresses(self.model).items() if before.get(name) != address):
            raise WeightSyncError(
                f"{type(self.model).__name__} replaced {moved[:3]} … instead of filling them: captured graphs read "
                "the old memory, so this architecture cannot be updated in place"
            )

    def shutdown(self) -> None:
        self._areas = ()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """The stateless sender that vLLM 0.26 declares abstract; sending here needs the open areas."""
        raise NotImplementedError(f"{VLLM_BACKEND} sends through grpo_lib.weight_sync.ipc_channel.IpcSender")


def is_filled_in_place(model: torch.nn.Module) -> bool:
    """Whether nothing in the model changes or copies its weights after they are loaded.

    So it is with unquantised layers on a CUDA device. Whatever else has something to do after loading says no.
    """
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.platforms import current_platform
    from vllm.v1.attention.backend import AttentionImplBase

    if not current_platform.is_cuda():
        return False
    hook = "process_weights_after_loading"
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method) not in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
            return False
        if not hasattr(module, hook):
            continue
        if type(module) is not Attention or getattr(type(module.impl), hook) is not getattr(AttentionImplBase, hook):
            return False
    return True


def _addresses(model: torch.nn.Module) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
