"""The optimiser step of the OLMo-core trainer: its AdamW and schedules, clipping, and proof that weights moved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from olmo_core.nn.transformer import Transformer
from olmo_core.optim import AdamWConfig
from olmo_core.optim.scheduler import ConstantScheduler, ConstantWithWarmup, CosWithWarmup, LinearWithWarmup, Scheduler
from torch.distributed.tensor import DTensor

from grpo_lib.config import TrainerConfig
from grpo_lib.errors import ConfigError, NonFiniteGradient
from grpo_lib.trainers.measured_adamw import MeasuredAdamW, global_norm
from grpo_lib.types import Stat, StepMetrics


@dataclass
class _MeasuredAdamWConfig(AdamWConfig):
    """OLMo-core's parameter groups around our AdamW."""

    @classmethod
    def optimizer(cls) -> type[torch.optim.AdamW]:
        return MeasuredAdamW


class SteppedAdamW:
    """AdamW on fp32 masters, whose learning rate is a function of the number of steps already applied.

    Keeping no schedule state means that a resumed run and a step that was not applied need no bookkeeping.

    Args:
        model: Of the masters.
        copies: Master → the weight in another dtype that follows it.
    """

    def __init__(
        self,
        model: Transformer,
        config: TrainerConfig,
        *,
        total_steps: int,
        copies: Mapping[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._config, self._total_steps = config, total_steps
        self._schedule = _schedule(config)
        self.adamw: MeasuredAdamW = _MeasuredAdamWConfig(
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            fused=True,  # one kernel for all shards: five times faster here than a dispatch per tensor and operation
        ).build(model)  # pyright: ignore[reportAttributeAccessIssue] of the class that the configuration names
        self.adamw.copies = copies or {}
        for parameter in self._parameters:
            # PyTorch fills in missing state while saving by a real step with zero gradients, which counts: after a
            # checkpoint at version 0 the first update would be half as large. So the state exists from the start.
            self.adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def learning_rate(self, step: int) -> float:
        """Learning rate of the step that `step` applied steps precede; never 0."""
        # OLMo-core counts from 1 during warm-up, so that the first step learns; its decays reach 0 at `total_steps`,
        # which is one past the last step when counted from 0.
        current = min(step + 1, self._config.warmup_steps) if step < self._config.warmup_steps else step
        return float(self._schedule.get_lr(self._config.learning_rate, current, self._total_steps))

    def step(self, applied_steps: int) -> StepMetrics:
        """Clip by the global norm, apply one update, clear the gradients; the metrics are the same on every rank.

        On a GPU the host waits once, for the numbers that it reports.

        Raises:
            NonFiniteGradient: the gradient norm is NaN or infinite; nothing is applied, the gradients are dropped.
        """
        learning_rate = self.learning_rate(applied_steps)
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        norm = self._global_grad_norm()
        if norm.is_cuda:
            self.adamw.start(applied_steps, norm=norm, max_norm=self._config.max_grad_norm)
        else:
            self._refuse(norm, applied_steps)
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._config.max_grad_norm, norm)
            self.adamw.start(applied_steps)
        self.adamw.step()
        change = self.adamw.change()
        dist.all_reduce(change)
        self.zero_grad()  # while a GPU is at work
        num_changed, sum_of_squares, norm_value = torch.cat([change, norm.double()[None]]).tolist()
        self._refuse(norm_value, applied_steps)  # on a GPU the update has seen it too and has written nothing
        num_elements = sum(parameter.numel() for parameter in self._parameters)
        return StepMetrics(
            stats={
                "optim/grad_norm": Stat.mean(norm_value, 1),
                "optim/lr": Stat.mean(learning_rate, 1),
                "optim/update_rms": Stat.mean(math.sqrt(sum_of_squares / num_elements), 1),
                "optim/weights_moved": Stat.min(float(num_changed > 0)),
            }
        )

    def set_applied_steps(self, applied_steps: int) -> None:
        """The number of steps that AdamW's bias correction counts."""
        for parameter in self._parameters:
            self.adamw.state[parameter]["step"].fill_(applied_steps)

    def zero_grad(self) -> None:
        self.adamw.zero_grad(set_to_none=True)

    def _refuse(self, norm: float | torch.Tensor, applied_steps: int) -> None:
        """Raise unless the norm is finite."""
        if not math.isfinite(norm):
            self.zero_grad()
            self.set_applied_steps(applied_steps)
            raise NonFiniteGradient(
                f"gradient norm is {float(norm)} before step {applied_steps}; weights and optimiser are unchanged"
            )

    def _global_grad_norm(self) -> torch.Tensor:
        """L2 norm over all parameters and ranks, a scalar on the device."""
        grads = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        assert len(grads) == len(self._parameters), "optim_step without a forward_backward before it"
        if grads[0].is_cuda:
            total = global_norm(grads)
            if dist.get_world_size() == 1:
                return total
            squares = total.square()
            dist.all_reduce(squares)
            return squares.sqrt()
        norm = torch.nn.utils.get_total_norm(grads)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _schedule(config: TrainerConfig) -> Scheduler:
    warmup = config.warmup_steps
    if config.lr_scheduler == "constant":
        return ConstantWithWarmup(warmup=warmup) if warmup else ConstantScheduler()
    if config.lr_scheduler == "linear":
        return LinearWithWarmup(alpha_f=0.0, warmup=warmup)
    if config.lr_scheduler == "cosine":
        return CosWithWarmup(alpha_f=0.0, warmup=warmup)
    raise ConfigError([f"trainer.lr_scheduler ({config.lr_scheduler}) must be constant, linear or cosine"])
