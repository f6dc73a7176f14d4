"""The one place that imports DeepSpeed: its settings, and an engine around a model.

DeepSpeed picks its accelerator and probes its operators while it is imported, so the import waits until the device is
known.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from grpo_lib.config import TrainerConfig
from grpo_lib.errors import GrpoError
from grpo_lib.trainers.hf_deepspeed_model import TokenLogprobModel


class DeepSpeedRuntime:
    """DeepSpeed on one kind of device, over the process group that exists.

    Args:
        config: ZeRO stage and bucket size.
        dtype: Compute dtype.
    """

    def __init__(self, config: TrainerConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        self.stage, self._device, self._dtype = config.zero_stage, device, dtype
        self._bucket_bytes = config.bucket_mib << 20
        self._deepspeed = _import_deepspeed(device)

    def init_context(self) -> AbstractContextManager[object]:
        """Where to build the model: ZeRO-3 shards each module as soon as it exists, so that no rank holds all of it.

        The two are not nested: PyTorch remembers for good which functions a device context redirects, and inside ZeRO's
        these are wrappers. Every later device context of the process would do nothing.
        """
        if self.stage < 3:
            return self._device
        zero = self._deepspeed.zero
        # Overriding the dtype of new tensors as well would round the rotary embedding's frequencies to bfloat16.
        return zero.Init(config_dict_or_path=self._settings(), tensor_overrides=[zero.DeepSpeedTensorOverride.device])

    def gathered(self, parameter: torch.nn.Parameter) -> AbstractContextManager[object]:
        """Inside, the parameter is whole on every rank; collective under ZeRO-3."""
        return self._deepspeed.zero.GatheredParameters([parameter], enabled=self.stage == 3)

    def engine(self, model: TokenLogprobModel, optimizer: torch.optim.Optimizer | None) -> Any:
        """A `DeepSpeedEngine`; without an optimiser only ZeRO-3 needs one, to gather what a forward pass uses."""
        if self.stage == 3:
            self._deepspeed.zero.register_external_parameter(model.head, model.head.weight)
        engine, *_ = self._deepspeed.initialize(
            model=model, optimizer=optimizer, config=self._settings(), dist_init_required=False
        )
        return engine

    def local_fp32(self, parameter: torch.nn.Parameter, moment: str | None = None) -> torch.Tensor:
        """ZeRO-3: this rank's part of the master weight or of a moment, padding included."""
        if moment is None:
            return self._deepspeed.utils.safe_get_local_fp32_param(parameter)
        return self._deepspeed.utils.safe_get_local_optimizer_state(parameter, moment)

    def local_gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """ZeRO-3: this rank's part of the gradient, padding included."""
        return self._deepspeed.utils.safe_get_local_grad(parameter)

    def _settings(self) -> dict[str, Any]:
        """DeepSpeed's configuration.

        Gradients are reduced and accumulated in fp32 whatever the compute dtype, and summed over the ranks: losses here
        are divided by a denominator that already counts all ranks. ZeRO-3 can only average, see `loss_scale`. One rank
        has nothing to reduce and need not widen gradients for it, nor overlap it.
        Clipping and the check for gradients that are not finite are left to `ZeroAdamW`: DeepSpeed would clip inside
        the step, and skip the update in silence.
        """
        is_alone, is_half = dist.get_world_size() == 1, self._dtype is torch.bfloat16
        bucket = self._bucket_bytes // 4  # elements
        settings: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,  # nominal: micro-batches come from the step's plan
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,
            "communication_data_type": "bf16" if is_alone and is_half else "fp32",
            "data_types": {"grad_accum_dtype": "fp32"},
            "bf16": {"enabled": is_half, "check_grad_overflow": False},
            "steps_per_print": None,
            "zero_allow_untested_optimizer": True,  # it knows optimisers by exact class, and ours inherits AdamW's
            "zero_optimization": {
                "stage": self.stage,
                "overlap_comm": self._device.type == "cuda" and not is_alone,
                "reduce_bucket_size": bucket,
                "allgather_bucket_size": bucket,
            },
        }
        if self.stage < 3:
            settings["gradient_allreduce_op"] = "sum"
        if self.stage in (1, 2):
            settings["zero_optimization"]["compute_grad_norm"] = False
        return settings

    @property
    def loss_scale(self) -> float:
        """What a loss is multiplied by, so that the reduced gradient is the sum over ranks.

        ZeRO-3 divides by the number of ranks and has no setting for it. Scaling the loss is exact for a power of two
        and off by rounding otherwise.
        """
        return float(dist.get_world_size()) if self.stage == 3 else 1.0


def _import_deepspeed(device: torch.device) -> ModuleType:
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", "0")  # a rank sees one device only
    import deepspeed

    # transformers may have imported it first, and an accelerator is chosen once in a process.
    accelerator: Any = deepspeed.get_accelerator()
    found = accelerator.device_name()
    if found != device.type:
        raise GrpoError(
            f"DeepSpeed runs on {found!r}, the trainer on {device.type!r}; set DS_ACCELERATOR={device.type}"
        )
    # Else it compiles a shared-memory operator for minutes, and a killed build leaves a lock that hangs later runs.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend="nccl" if device.type == "cuda" else "gloo", dist_init_required=False, verbose=False
    )
    return deepspeed
