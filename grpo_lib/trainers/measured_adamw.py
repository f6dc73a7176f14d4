"""AdamW that also tells what its last steps changed. Both trainers use it, so that neither pays more for the proof.

On a CPU it is PyTorch's fused AdamW between a copy and a comparison. On a GPU that would move 150 GB through memory
for a model of 4 billion parameters, beside the 110 GB of the update itself, and clipping before it another 30. There
one kernel reads the gradients, clips, updates and adds up the change that it has in registers anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, overload

import torch
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from grpo_lib.trainers.adamw_kernel import Held


class MeasuredAdamW(torch.optim.AdamW):
    """PyTorch's AdamW with a count of what it changed since `start`.

    Args:
        applied_steps: Of `start`: the number of steps that bias correction counts before this one.
    """

    copies: Mapping[torch.Tensor, torch.Tensor] = MappingProxyType({})  # parameter → what takes its rounded value
    _norm: torch.Tensor | None = None
    _max_norm = 0.0
    _applied_steps = 0
    _change: torch.Tensor | None = None  # [2, slots] float64 on the device: elements changed, sum of squares

    def __init__(self, *parameters: Any, **options: Any) -> None:
        super().__init__(*parameters, **options)
        self._known: dict[torch.Tensor, Held] = {}

    def start(self, applied_steps: int, *, norm: torch.Tensor | None = None, max_norm: float = 0.0) -> None:
        """Forget what was changed, and clip in the steps that follow.

        Args:
            norm: Scalar on the GPU. Gradients are scaled by ``max_norm / norm`` where that is below 1; a step with a
                norm that is not finite changes nothing. None on a CPU, where gradients are clipped beforehand.
        """
        assert norm is None or norm.is_cuda, "on a CPU gradients are clipped beforehand"
        self._norm, self._max_norm, self._applied_steps, self._change = norm, max_norm, applied_steps, None

    def change(self) -> torch.Tensor:
        """[2] float64 on the device: changed elements, and the sum of squared changes, of this rank since `start`."""
        assert self._change is not None, "no step since `start`"
        return self._change.sum(1)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update; several calls between two `start` belong to one step of different parameters."""
        assert closure is None, "gradients come from the trainer"
        groups = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        parameters = [parameter for _, members in groups for parameter in members]
        if parameters and parameters[0].is_cuda:
            self._step_in_one_pass(groups)
        else:
            before = [local_tensor(parameter).clone() for parameter in parameters]
            super().step()
            for parameter, old in zip(parameters, before, strict=True):
                self._add_change(old.sub_(local_tensor(parameter)))
                if parameter in self.copies:
                    self.copies[parameter].copy_(parameter)
        return None

    def _step_in_one_pass(self, groups: list[tuple[dict[str, Any], list[torch.Tensor]]]) -> None:
        from grpo_lib.trainers import adamw_kernel

        assert self._norm is not None, "on a GPU clipping is part of the step"
        if self._change is None:
            self._change = adamw_kernel.no_change(self._norm.device)
        for group, parameters in groups:
            if not parameters:
                continue
            states = [self.state[parameter] for parameter in parameters]
            adamw_kernel.update(
                [
                    (self._held(parameter, state), _local(parameter.grad))
                    for parameter, state in zip(parameters, states, strict=True)
                ],
                settings=adamw_kernel.Settings.of(group, step=self._applied_steps + 1),
                norm=self._norm,
                max_norm=self._max_norm,
                change=self._change,
            )
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, 1)  # pyright: ignore[reportPrivateImportUsage] as PyTorch's optimisers do

    def _held(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> Held:
        """Tensors of one parameter, looked at once for as long as they are the same objects.

        Looking at all of them takes milliseconds, in which a GPU would wait. Their addresses are read at every step.
        """
        from grpo_lib.trainers import adamw_kernel

        weight, exp_avg, exp_avg_sq = _local(parameter), _local(state["exp_avg"]), _local(state["exp_avg_sq"])
        copy = self.copies.get(parameter)
        held = self._known.get(parameter)
        if (
            held is None
            or held.weight is not weight
            or held.exp_avg is not exp_avg
            or held.exp_avg_sq is not exp_avg_sq
            or held.copy is not copy
        ):
            held = adamw_kernel.Held(weight=weight, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, copy=copy)
            self._known[parameter] = held
        return held

    def _add_change(self, change: torch.Tensor) -> None:
        if self._change is None:
            self._change = torch.zeros(2, 1, dtype=torch.float64, device=change.device)
        self._change[0] += change.count_nonzero()  # counted, because squares of tiny changes underflow
        self._change[1] += change.square_().sum(dtype=torch.float64)


def global_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """L2 norm over all gradients of this rank on a GPU, a float32 scalar there."""
    from grpo_lib.trainers import adamw_kernel

    return adamw_kernel.total_norm([_local(tensor) for tensor in tensors])


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard, without gradient history, sharing its storage."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():  # the shard itself; detaching a DTensor first takes as long as an update's launch
            return tensor.to_local()
    return tensor.detach()


def _local(tensor: torch.Tensor | None) -> torch.Tensor:
    """`local_tensor` for readers of addresses: hundreds of detached tensors are a millisecond that a GPU waits."""
    assert tensor is not None
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
