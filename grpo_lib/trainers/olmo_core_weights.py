"""Where an OLMo-core model's weights, gradients and fp32 masters are: sharded over the ranks, or whole on one.

Several ranks run FSDP2. One rank has nothing to shard, and FSDP2 would only copy: weights into the buffer of a gather,
gradients into that of a reduction and out again, about a tenth of a step of a model of 4 billion parameters. It keeps
whole tensors instead: weights in the compute dtype, and masters beside them where that is not fp32.

Both look the same from outside. `model` computes; `masters` has the same names in fp32 and is what the optimiser,
checkpoints and dumps see, gradients included. They are one module unless one rank computes in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from olmo_core.nn.transformer import Transformer
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from grpo_lib.trainers.measured_adamw import local_tensor
from grpo_lib.trainers.state_parts import Part


class Weights(Protocol):
    """The tensors of one rank."""

    model: Transformer
    masters: Transformer
    units: tuple[tuple[str, ...], ...]  # parameter names in the order that they are gathered in, the same on every rank

    def backward(self, value: torch.Tensor, *, is_last: bool) -> None:
        """Add a micro-batch's gradients to those of the masters; after the last one they are those of all ranks."""
        ...

    def release(self) -> None:
        """After a forward pass that no backward pass follows."""
        ...

    def gathered(self, unit: int) -> list[tuple[str, torch.Tensor]]:
        """Clones of a unit's full weights in the compute dtype; collective."""
        ...

    def full(self, tensor: torch.Tensor) -> torch.Tensor:
        """A master, its gradient or a moment, whole in fp32 and a copy; collective."""
        ...

    def fill(self, tensor: torch.Tensor, read_rows: Callable[[int, int], torch.Tensor]) -> None:
        """This rank's rows [start, stop) of a master or a moment."""
        ...

    def part(self, tensor: torch.Tensor) -> Part:
        """This rank's share of a master or a moment."""
        ...

    def publish(self) -> None:
        """After a change of the masters other than an optimiser step's: what the model computes with follows."""
        ...

    def copies(self) -> dict[torch.Tensor, torch.Tensor]:
        """Master → the weight in another dtype that an optimiser step has to write with it."""
        ...


class ShardedWeights:
    """FSDP2: fp32 shards, gathered in the compute dtype unit by unit."""

    def __init__(self, model: Transformer, mesh: DeviceMesh) -> None:
        self.model = self.masters = model
        self._mesh = mesh
        self.root = fsdp_modules(model)[0]
        owned = _owned(model)
        self._modules = tuple(owned)
        self.units = tuple(owned.values())

    def backward(self, value: torch.Tensor, *, is_last: bool) -> None:
        self.root.set_is_last_backward(is_last)
        value.backward()

    def release(self) -> None:
        # OLMo-core leaves an untied head gathered after its forward for the backward that follows. None follows here,
        # and the gathered copy would outlive the next load or optimiser step.
        for module in self._modules:
            module.reshard()

    def gathered(self, unit: int) -> list[tuple[str, torch.Tensor]]:
        module = self._modules[unit]
        module.unshard()
        try:
            # The gather must be over on this rank before a consumer starts a transfer of its own, and the clones must
            # exist before the gathered storage is freed.
            return _clones(self.model, self.units[unit])
        finally:
            module.reshard()

    def full(self, tensor: torch.Tensor) -> torch.Tensor:
        assert isinstance(tensor, DTensor)
        return tensor.full_tensor().clone()

    @torch.no_grad()
    def fill(self, tensor: torch.Tensor, read_rows: Callable[[int, int], torch.Tensor]) -> None:
        start, stop = shard_rows(tensor.shape[0], self._mesh.size(), self._mesh.get_local_rank())
        local_tensor(tensor).copy_(read_rows(start, stop))

    def part(self, tensor: torch.Tensor) -> Part:
        row, _ = shard_rows(tensor.shape[0], self._mesh.size(), self._mesh.get_local_rank())
        return Part(start=row * math.prod(tensor.shape[1:]), values=local_tensor(tensor.detach()).view(-1))

    def publish(self) -> None:
        """Every gather casts the shards anew."""

    def copies(self) -> dict[torch.Tensor, torch.Tensor]:
        return {}


class WholeWeights:
    """One rank: whole tensors.

    Args:
        model: In the compute dtype.
        masters: In fp32; the model itself where that is the compute dtype, and where nothing is trained.
    """

    def __init__(self, model: Transformer, masters: Transformer) -> None:
        self.model, self.masters = model, masters
        self.units = _by_block(name for name, _ in model.named_parameters())
        self._pairs: list[tuple[torch.nn.Parameter, torch.nn.Parameter]] = []
        self._has_one_pass = False
        if masters is not model:
            # A tied parameter is listed once, under its first name, in both.
            self._pairs = list(zip(masters.parameters(), model.parameters(), strict=True))
            for master, parameter in self._pairs:
                master.grad_dtype = None  # any: see `backward`
                parameter.register_post_accumulate_grad_hook(self._hand_over(master))

    def backward(self, value: torch.Tensor, *, is_last: bool) -> None:
        # The gradients of a step with one micro-batch are what the products gave, and stay in their dtype where the
        # update can read it: widened they would be the same numbers in twice the memory.
        self._has_one_pass = is_last and value.is_cuda and all(master.grad is None for master, _ in self._pairs)
        value.backward()

    def release(self) -> None:
        """Nothing was gathered."""

    def gathered(self, unit: int) -> list[tuple[str, torch.Tensor]]:
        return _clones(self.model, self.units[unit])

    def full(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(torch.float32, copy=True)

    @torch.no_grad()
    def fill(self, tensor: torch.Tensor, read_rows: Callable[[int, int], torch.Tensor]) -> None:
        tensor.copy_(read_rows(0, tensor.shape[0]))

    def part(self, tensor: torch.Tensor) -> Part:
        return Part(start=0, values=tensor.detach().view(-1))

    @torch.no_grad()
    def publish(self) -> None:
        for master, parameter in self._pairs:
            parameter.copy_(master)

    def copies(self) -> dict[torch.Tensor, torch.Tensor]:
        return dict(self._pairs)

    def _hand_over(self, master: torch.nn.Parameter) -> Callable[[torch.Tensor], None]:
        """Moves a parameter's gradient to its master, as soon as a backward pass has it."""

        def hook(parameter: torch.Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            if master.grad is not None:
                if master.grad.dtype is not torch.float32:
                    master.grad = master.grad.float()
                master.grad.add_(gradient)
            else:
                master.grad = gradient if self._has_one_pass else gradient.float()

        return hook


def fsdp_modules(model: Transformer) -> list[FSDPModule]:
    """Modules that own FSDP parameters, the root first; the same order on every rank."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def shard_rows(num_rows: int, num_shards: int, shard: int) -> tuple[int, int]:
    """Rows [start, stop) of a shard: `torch.chunk`'s split, which FSDP2 uses; the last shards may be short or empty."""
    size = -(-num_rows // num_shards)
    return min(shard * size, num_rows), min((shard + 1) * size, num_rows)


def _clones(model: Transformer, names: Sequence[str]) -> list[tuple[str, torch.Tensor]]:
    """Copies of whole parameters, there when this returns: consumers may read them from other streams and processes."""
    clones = []
    for name in names:
        parameter = model.get_parameter(name)
        assert not isinstance(parameter, DTensor), f"{name} is still sharded: its local part is not its value"
        clones.append((name, parameter.detach().clone(memory_format=torch.contiguous_format)))
    if clones[0][1].is_cuda:
        torch.cuda.synchronize(clones[0][1].device)
    return clones


def _by_block(names: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Names in groups that are cloned together: those of one block, and all others."""
    groups: dict[str, list[str]] = {}
    for name in names:
        top, block, *_ = name.split(".")
        groups.setdefault(block if top == "blocks" else "", []).append(name)
    return tuple(map(tuple, groups.values()))


def _owned(model: torch.nn.Module) -> dict[FSDPModule, tuple[str, ...]]:
    """FSDP modules with the names of the parameters that each of them gathers."""
    owners = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    owned: dict[str, list[str]] = {name: [] for name in owners}
    for parameter_name, _ in model.named_parameters():  # a tied parameter once, under its first name
        prefixes = [name for name in owners if name == "" or parameter_name.startswith(f"{name}.")]
        owned[max(prefixes, key=len)].append(parameter_name)
    return {owners[name]: tuple(names) for name, names in owned.items() if names}
