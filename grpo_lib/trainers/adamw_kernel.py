"""AdamW in Triton: clip, update and measure in one pass over gradient, weight and moments, and the norm before it.

One launch covers all tensors of a kind: a model has hundreds, many of them small, and between two launches memory is
idle. A program finds its tensor in a table of addresses.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from grpo_lib.trainers.joined_documents import copied_to

_ELEMENTS = 1024  # of a program that updates
_WARPS = 4
_NORM_ELEMENTS = 8192  # of a program that adds up squares
_NORM_WARPS = 8
_SLOTS = 1024  # places that programs add their change to: at one place they would queue
_ALIGNMENT = 16  # bytes of an address, and elements of a tensor, that let a thread load 16 bytes at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an update is made of, with the bias corrections of its step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    correction1: float  # 1 - beta1 ** step
    root_correction2: float  # sqrt(1 - beta2 ** step)

    @staticmethod
    def of(group: Mapping[str, Any], *, step: int) -> Settings:
        """From a parameter group of PyTorch's AdamW; `step` counts from 1."""
        assert not any(group[option] for option in ("amsgrad", "maximize")), "not used here"
        beta1, beta2 = group["betas"]
        return Settings(
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            correction1=1 - beta1**step,
            root_correction2=math.sqrt(1 - beta2**step),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What an optimiser keeps of one parameter: contiguous tensors of one shape.

    Args:
        weight: fp32, as the moments are.
        copy: Takes the new weight, rounded to its dtype.
    """

    weight: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    copy: torch.Tensor | None = None

    def __post_init__(self) -> None:
        assert all(t.dtype is torch.float32 for t in (self.weight, self.exp_avg, self.exp_avg_sq))
        for tensor in (self.weight, self.exp_avg, self.exp_avg_sq, self.weight if self.copy is None else self.copy):
            assert tensor.is_contiguous(), tensor.stride()
            assert tensor.shape == self.weight.shape, (tensor.shape, self.weight.shape)

    def with_gradient(self, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """A row of the kernel's table. The gradient is in fp32, or in the dtype of the weights that it was taken of."""
        assert gradient.is_contiguous(), gradient.stride()
        assert gradient.shape == self.weight.shape, (gradient.shape, self.weight.shape)
        return self.weight, gradient, self.exp_avg, self.exp_avg_sq, self.weight if self.copy is None else self.copy


def no_change(device: torch.device) -> torch.Tensor:
    """[2, slots] float64 for `update` to add to."""
    return torch.zeros(2, _SLOTS, dtype=torch.float64, device=device)


def update(
    updates: Sequence[tuple[Held, torch.Tensor]],
    *,
    settings: Settings,
    norm: torch.Tensor,
    max_norm: float,
    change: torch.Tensor,
) -> None:
    """One step of all parameters, in place.

    Args:
        updates: Parameters and their gradients.
        norm: Scalar float32 on the device. Nothing is written where it is NaN or infinite, else the gradient counts
            ``min(1, max_norm / (norm + 1e-6))`` times, as in PyTorch's clipping.
        change: From `no_change`.
    """
    assert norm.dtype is torch.float32, norm.dtype
    assert change.shape == (2, _SLOTS), change.shape
    kinds: dict[tuple[torch.dtype, torch.dtype | None], list[tuple[torch.Tensor, ...]]] = {}
    for held, gradient in updates:
        if gradient.numel():
            kind = gradient.dtype, None if held.copy is None else held.copy.dtype  # a kernel is compiled for
            kinds.setdefault(kind, []).append(held.with_gradient(gradient))
    for (gradient_dtype, copy_dtype), members in kinds.items():
        table = _Table.of(members, _ELEMENTS)
        _update[(table.num_programs,)](
            table.addresses, table.sizes, table.owners, table.firsts, norm, change, max_norm, settings.lr,
            1 - settings.lr * settings.weight_decay, settings.beta1, 1 - settings.beta1, settings.beta2,
            1 - settings.beta2, settings.eps, settings.correction1, settings.root_correction2,
            GRADIENT=_NAMES[gradient_dtype], COPY=_NAMES[copy_dtype or torch.float32], HAS_COPY=copy_dtype is not None,
            ALIGNED=table.is_aligned, ELEMENTS=_ELEMENTS, SLOTS=_SLOTS,
            num_warps=_WARPS,  # pyright: ignore[reportCallIssue] an argument of the launch
        )  # fmt: skip


def total_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """L2 norm over all contiguous tensors of one dtype, a float32 scalar on their device.

    Squares are added up in fp32 within a program and in float64 over programs, always in the same order.
    """
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled:
        return torch.zeros((), dtype=torch.float32, device=tensors[0].device)
    assert all(t.is_contiguous() and t.dtype is filled[0].dtype for t in filled)
    table = _Table.of([(tensor,) for tensor in filled], _NORM_ELEMENTS)
    sums = torch.empty(table.num_programs, dtype=torch.float32, device=filled[0].device)
    _squares[(table.num_programs,)](
        table.addresses, table.sizes, table.owners, table.firsts, sums,
        VALUE=_NAMES[filled[0].dtype], ALIGNED=table.is_aligned, ELEMENTS=_NORM_ELEMENTS,
        num_warps=_NORM_WARPS,  # pyright: ignore[reportCallIssue] an argument of the launch
    )  # fmt: skip
    return sums.sum(dtype=torch.float64).sqrt().float()


_NAMES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """Where the tensors of a launch are, and which part of which one a program has."""

    addresses: torch.Tensor  # [tensors, columns] int64
    sizes: torch.Tensor  # [tensors] int64, elements
    owners: torch.Tensor  # [programs] int32, a program's tensor
    firsts: torch.Tensor  # [tensors] int64, a tensor's first program
    is_aligned: bool

    @property
    def num_programs(self) -> int:
        return len(self.owners)

    @staticmethod
    def of(rows: Sequence[tuple[torch.Tensor, ...]], elements: int) -> _Table:
        """Of rows of tensors with as many elements each; those must live until the launch is over."""
        device = rows[0][0].device
        sizes = tuple(row[0].numel() for row in rows)
        addresses = [[tensor.data_ptr() for tensor in row] for row in rows]
        is_aligned = not any(value % _ALIGNMENT for row in (sizes, *addresses) for value in row)
        size, owners, firsts = _shares(sizes, elements, device)
        table = copied_to(torch.tensor(addresses), device)
        return _Table(addresses=table, sizes=size, owners=owners, firsts=firsts, is_aligned=is_aligned)


@functools.lru_cache(maxsize=16)  # a model's sizes stay, its gradients' addresses do not
def _shares(
    sizes: tuple[int, ...], elements: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    size = torch.tensor(sizes)
    programs = (size + elements - 1) // elements
    owners = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), programs)
    return size.to(device), owners.to(device), (programs.cumsum(0) - programs).to(device)


@triton.jit
def _update(
    addresses, sizes, owners, firsts, norm, change, max_norm, lr, decay, beta1, rest1, beta2, rest2, eps, correction1,
    root_correction2, GRADIENT: tl.constexpr, COPY: tl.constexpr, HAS_COPY: tl.constexpr, ALIGNED: tl.constexpr,
    ELEMENTS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    owner = tl.load(owners + program)
    num_elements = tl.load(sizes + owner)
    row = addresses + owner * 5
    weight = tl.load(row).to(tl.pointer_type(tl.float32))
    gradient = tl.load(row + 1).to(tl.pointer_type(GRADIENT))  # pyright: ignore[reportArgumentType] a dtype while it compiles
    exp_avg = tl.load(row + 2).to(tl.pointer_type(tl.float32))
    exp_avg_sq = tl.load(row + 3).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        num_elements = tl.multiple_of(num_elements, 16)
        weight = tl.multiple_of(weight, 16)
        gradient = tl.multiple_of(gradient, 16)
        exp_avg = tl.multiple_of(exp_avg, 16)
        exp_avg_sq = tl.multiple_of(exp_avg_sq, 16)
    places = (program - tl.load(firsts + owner)) * ELEMENTS + tl.arange(0, ELEMENTS)
    total_norm = tl.load(norm)
    inside = places < tl.where(total_norm < float("inf"), num_elements, 0)  # nowhere for NaN, too
    g = tl.load(gradient + places, mask=inside, other=0.0).to(tl.float32) * tl.minimum(
        1.0, max_norm / (total_norm + 1e-6)
    )
    old = tl.load(weight + places, mask=inside, other=0.0)
    m = beta1 * tl.load(exp_avg + places, mask=inside, other=0.0) + rest1 * g
    v = beta2 * tl.load(exp_avg_sq + places, mask=inside, other=0.0) + rest2 * g * g
    new = old * decay - (lr / correction1) * m / (tl.sqrt(v) / root_correction2 + eps)
    tl.store(exp_avg + places, m, mask=inside)
    tl.store(exp_avg_sq + places, v, mask=inside)
    tl.store(weight + places, new, mask=inside)
    if HAS_COPY:
        copy = tl.load(row + 4).to(tl.pointer_type(COPY))  # pyright: ignore[reportArgumentType]
        if ALIGNED:
            copy = tl.multiple_of(copy, 16)
        tl.store(copy + places, new.to(COPY), mask=inside)
    moved = tl.where(inside, new - old, 0.0)
    slot = change + program % SLOTS
    tl.atomic_add(slot, tl.sum((moved != 0).to(tl.float32), 0).to(tl.float64))
    tl.atomic_add(slot + SLOTS, tl.sum(moved * moved, 0).to(tl.float64))


@triton.jit
def _squares(
    addresses, sizes, owners, firsts, sums, VALUE: tl.constexpr, ALIGNED: tl.constexpr, ELEMENTS: tl.constexpr
):
    program = tl.program_id(0)
    owner = tl.load(owners + program)
    num_elements = tl.load(sizes + owner)
    values = tl.load(addresses + owner).to(tl.pointer_type(VALUE))  # pyright: ignore[reportArgumentType]
    if ALIGNED:
        num_elements = tl.multiple_of(num_elements, 16)
        values = tl.multiple_of(values, 16)
    places = (program - tl.load(firsts + owner)) * ELEMENTS + tl.arange(0, ELEMENTS)
    x = tl.load(values + places, mask=places < num_elements, other=0.0).to(tl.float32)
    tl.store(sums + program, tl.sum(x * x, 0))
