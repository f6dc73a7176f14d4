"""One view of what ZeRO's stages keep where: every parameter's fp32 weight, gradient and moments on this rank.

A `Part` is a run of a parameter's elements. Stage 0 keeps whole parameters on every rank; stages 1 and 2 cut the
concatenation of all parameters, stage 3 each parameter. Parts share memory with what DeepSpeed computes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist

from grpo_lib.trainers.hf_deepspeed_engine import DeepSpeedRuntime
from grpo_lib.trainers.state_parts import Part
from grpo_lib.types import StateKind

_NO_GRADIENT = "no gradient outside of forward_backward … optim_step"


class ShardedState(Protocol):
    """The fp32 state of one rank under one ZeRO stage."""

    masters: list[torch.Tensor]  # what AdamW updates

    def held(self, kind: StateKind, name: str) -> Part:
        """All that this rank keeps of a tensor."""
        ...

    def own(self, kind: StateKind, name: str) -> Part:
        """What this rank speaks for; the ranks' own parts cover the tensor exactly once."""
        ...

    def publish(self) -> None:
        """Make the weights that the model computes with those of the masters, on every rank; collective."""
        ...

    def drop_gradients(self) -> None: ...


class ReplicatedState:
    """Stage 0, and a frozen model that is not sharded: the model's own parameters."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], adamw: torch.optim.AdamW | None) -> None:
        self._parameters, self._adamw = parameters, adamw
        self._order = {name: number for number, name in enumerate(parameters)}
        self.masters: list[torch.Tensor] = list(parameters.values())

    def held(self, kind: StateKind, name: str) -> Part:
        parameter = self._parameters[name]
        if kind is StateKind.WEIGHT:
            values = parameter.detach()
        elif kind is StateKind.GRADIENT:
            assert parameter.grad is not None, _NO_GRADIENT
            values = parameter.grad
        else:
            assert self._adamw is not None, "a frozen model has no moments"
            values = self._adamw.state[parameter][kind.value]
        return Part(start=0, values=values.view(-1))

    def own(self, kind: StateKind, name: str) -> Part:
        """Whole parameters, dealt out to the ranks: a copy of one then copies no other rank's memory."""
        held = self.held(kind, name)
        if self._order[name] % dist.get_world_size() == dist.get_rank():
            return held
        return Part(start=0, values=torch.empty_like(held.values[:0]))

    def publish(self) -> None:
        """The masters are the model's parameters."""

    def drop_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None


class PartitionedState:
    """Stages 1 and 2: fp32 partitions of the flattened parameters, beside whole parameters in the compute dtype."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], zero: Any) -> None:
        self._parameters, self._zero = parameters, zero
        self.masters: list[torch.Tensor] = zero.single_partition_of_fp32_groups

    def held(self, kind: StateKind, name: str) -> Part:
        parameter: Any = self._parameters[name]
        assert kind is not StateKind.GRADIENT or _has_gradients(self._zero), _NO_GRADIENT
        mapping = parameter._hp_mapping
        if mapping is None:  # all of it is in other ranks' partitions
            return Part(start=0, values=torch.empty(0, dtype=torch.float32, device=parameter.device))
        if kind is StateKind.WEIGHT:
            values = mapping.hp_fragment.detach()
        elif kind is StateKind.GRADIENT:
            values = mapping.get_lp_grad_fragment(parameter._index_in_param_group).view(-1)
        else:
            moments = self._zero.optimizer.state[self.masters[mapping.param_group_index]]
            address = mapping.hp_fragment_address
            values = moments[kind.value].narrow(0, address.start, address.numel)
        assert values.numel() == mapping.lp_fragment_address.numel, (name, kind, values.shape)
        return Part(start=mapping.lp_fragment_address.start, values=values)

    def own(self, kind: StateKind, name: str) -> Part:
        return self.held(kind, name)

    def publish(self) -> None:
        self._zero.update_lp_params()

    def drop_gradients(self) -> None:
        self._zero.zero_grad()
        for group in list(self._zero.averaged_gradients):
            self._zero.averaged_gradients[group] = None
            self._zero.all_grad_tensors[group] = None
        self._zero._release_preflattened_grad_buffers()


class Stage3State:
    """Stage 3: each parameter cut evenly over the ranks, in fp32 and in the compute dtype."""

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], engine: Any, runtime: DeepSpeedRuntime, *, trainable: bool
    ) -> None:
        self._parameters, self._zero, self._runtime = parameters, engine.optimizer, runtime
        self._trainable = trainable
        self.masters: list[torch.Tensor] = self._zero.fp32_partitioned_groups_flat if trainable else []

    def held(self, kind: StateKind, name: str) -> Part:
        parameter: Any = self._parameters[name]
        if not self._trainable:
            assert kind is StateKind.WEIGHT, "a frozen model has weights only"
            return partitioned_part(parameter, parameter.ds_tensor.detach())
        if kind is StateKind.WEIGHT:
            values = self._runtime.local_fp32(parameter).detach()
        elif kind is StateKind.GRADIENT:
            assert _has_gradients(self._zero), _NO_GRADIENT
            values = self._runtime.local_gradient(parameter)
        else:
            values = self._runtime.local_fp32(parameter, kind.value)
        return partitioned_part(parameter, values)

    def own(self, kind: StateKind, name: str) -> Part:
        return self.held(kind, name)

    def publish(self) -> None:
        self._zero._partition_all_parameters()
        for group, flat in enumerate(self.masters):
            self._zero.fp16_partitioned_groups_flat[group].copy_(flat.detach())
            self._zero._unflatten_partitioned_parameters(group)
        if self._zero.persistent_parameters:  # small ones that are never sharded again would keep the old values
            self._zero.persistent_parameters[0].all_gather(self._zero.persistent_parameters)

    def drop_gradients(self) -> None:
        self._zero.zero_grad()
        self._zero.averaged_gradients = {}


def partitioned_part(parameter: Any, values: torch.Tensor) -> Part:
    """Values of a ZeRO-3 partition without the padding at the end of the last one."""
    start = min(dist.get_rank() * values.numel(), parameter.ds_numel)
    return Part(start=start, values=values.view(-1)[: parameter.ds_numel - start])


def _has_gradients(zero: Any) -> bool:
    """Whether all gradients of a step have been reduced and none has been used."""
    groups = zero.averaged_gradients
    return bool(groups) and all(gradients is not None for gradients in groups.values())


def gather(part: Part, shape: tuple[int, ...]) -> torch.Tensor:
    """The full fp32 tensor on every rank, from the parts that the ranks own; collective.

    Bits are added as integers, each with zeros of the other ranks: a sum of floats would turn -0 into 0.
    """
    full = torch.zeros(shape, dtype=torch.float32, device=part.values.device)
    full.view(-1)[part.start : part.start + part.values.numel()] = part.values
    dist.all_reduce(full.view(torch.int32))
    return full
