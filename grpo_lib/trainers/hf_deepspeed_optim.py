"""AdamW under ZeRO: learning rate and bias correction from the policy version, clipping, and what a step did."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from grpo_lib.algo.schedules import learning_rate
from grpo_lib.config import TrainerConfig
from grpo_lib.errors import NonFiniteGradient
from grpo_lib.trainers.hf_deepspeed_state import ShardedState
from grpo_lib.trainers.measured_adamw import MeasuredAdamW
from grpo_lib.types import Stat, StateKind, StepMetrics


def build_adamw(parameters: Sequence[torch.nn.Parameter], config: TrainerConfig) -> MeasuredAdamW:
    """AdamW, fused: one kernel for a whole partition."""
    return MeasuredAdamW(
        parameters,
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


class ZeroAdamW:
    """The optimiser step of an engine, whose learning rate is a function of the number of steps already applied.

    Args:
        engine: Owns the update: it moves gradients to the masters, steps AdamW and distributes the weights.
        names: Of all parameters.
    """

    def __init__(
        self,
        engine: Any,
        adamw: MeasuredAdamW,
        state: ShardedState,
        names: Sequence[str],
        config: TrainerConfig,
        *,
        total_steps: int,
    ) -> None:
        self._engine, self.adamw, self._state, self._names = engine, adamw, state, names
        self._config, self._total_steps = config, total_steps
        for master in state.masters:
            # From the start, so that a state can be read, saved and replaced before the first step.
            adamw.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(master, requires_grad=False),
            }

    def step(self, applied_steps: int) -> StepMetrics:
        """Clip by the global norm, apply one update, clear the gradients; the metrics are the same on every rank.

        Raises:
            NonFiniteGradient: the gradient norm is NaN or infinite; nothing is applied, the gradients are dropped.
        """
        norm = self._global_grad_norm()
        if not math.isfinite(norm):
            self._state.drop_gradients()
            raise NonFiniteGradient(
                f"gradient norm is {norm} before step {applied_steps}; weights and optimiser are unchanged"
            )
        self._clip(norm, applied_steps)
        rate = learning_rate(
            self._config.lr_scheduler,
            self._config.learning_rate,
            step=applied_steps,
            warmup_steps=self._config.warmup_steps,
            total_steps=self._total_steps,
        )
        for group in self.adamw.param_groups:
            group["lr"] = rate
        for moments in self.adamw.state.values():
            moments["step"].fill_(applied_steps)
        self._engine.step()
        update_rms, moved = self._update()
        return StepMetrics(
            stats={
                "optim/grad_norm": Stat.mean(norm, 1),
                "optim/lr": Stat.mean(rate, 1),
                "optim/update_rms": Stat.mean(update_rms, 1),
                "optim/weights_moved": Stat.min(float(moved)),
            }
        )

    def _clip(self, norm: float, applied_steps: int) -> None:
        """Scale the gradients here on a CPU, and within the update on a GPU."""
        device = self._state.masters[0].device
        if device.type == "cuda":
            on_device = torch.full((), norm, dtype=torch.float32, device=device)
            self.adamw.start(applied_steps, norm=on_device, max_norm=self._config.max_grad_norm)
            return
        self.adamw.start(applied_steps)
        scale = self._config.max_grad_norm / (norm + 1e-6)
        if scale < 1:
            for name in self._names:
                self._state.held(StateKind.GRADIENT, name).values.mul_(scale)

    def _global_grad_norm(self) -> float:
        """L2 norm over all parameters and ranks."""
        own = torch.nn.utils.get_total_norm([self._state.own(StateKind.GRADIENT, name).values for name in self._names])
        total = own.double().square()
        dist.all_reduce(total)
        return math.sqrt(float(total))

    def _update(self) -> tuple[float, bool]:
        """Root mean square of the change over all elements of all ranks, and whether there is any.

        Replicated masters are counted once for each rank, in the change and in the number of elements.
        """
        num_elements = sum(master.numel() for master in self._state.masters)
        change = self.adamw.change()
        totals = torch.cat([change, change.new_tensor([num_elements])])
        dist.all_reduce(totals)
        num_changed, sum_of_squares, num_elements = totals.tolist()
        return math.sqrt(sum_of_squares / num_elements), num_changed > 0
