"""AdamW in Triton: clip, update and measure in one pass over gradient, weight and moments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

_ELEMENTS = 2048  # of a program
_SLOTS = 1024  # places that programs add their change to: at one place they would queue
_WARPS = 8


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


def no_change(device: torch.device) -> torch.Tensor:
    """[2, slots] float64 for `update` to add to."""
    return torch.zeros(2, _SLOTS, dtype=torch.float64, device=device)


def update(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    copy: torch.Tensor | None = None,
    settings: Settings,
    norm: torch.Tensor,
    max_norm: float,
    change: torch.Tensor,
) -> None:
    """One step of contiguous tensors of one shape, in place; weight and moments are fp32.

    Args:
        gradient: In fp32, or in the dtype of the weights that it was taken of.
        copy: Takes the new weight, rounded to its dtype.
        norm: Scalar float32 on the device. Nothing is written where it is NaN or infinite, else the gradient counts
            ``min(1, max_norm / (norm + 1e-6))`` times, as in PyTorch's clipping.
        change: From `no_change`.
    """
    assert all(t.dtype is torch.float32 for t in (weight, exp_avg, exp_avg_sq))
    tensors = (weight, gradient, exp_avg, exp_avg_sq, weight if copy is None else copy)
    assert all(t.is_contiguous() and t.shape == weight.shape for t in tensors)
    assert norm.dtype is torch.float32, norm.dtype
    assert change.shape == (2, _SLOTS), change.shape
    num_elements = weight.numel()
    if num_elements:
        _update[(triton.cdiv(num_elements, _ELEMENTS),)](
            weight, gradient, exp_avg, exp_avg_sq, tensors[-1], norm, change, num_elements, max_norm, settings.lr,
            1 - settings.lr * settings.weight_decay, settings.beta1, 1 - settings.beta1, settings.beta2,
            1 - settings.beta2, settings.eps, settings.correction1, settings.root_correction2,
            HAS_COPY=copy is not None, ELEMENTS=_ELEMENTS, SLOTS=_SLOTS,
            num_warps=_WARPS,  # pyright: ignore[reportCallIssue] an argument of the launch
        )  # fmt: skip


@triton.jit
def _update(
    weight, gradient, exp_avg, exp_avg_sq, copy, norm, change, num_elements, max_norm, lr, decay, beta1, rest1, beta2,
    rest2, eps, correction1, root_correction2, HAS_COPY: tl.constexpr, ELEMENTS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    places = program.to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
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
        tl.store(copy + places, new.to(copy.dtype.element_ty), mask=inside)
    moved = tl.where(inside, new - old, 0.0)
    slot = change + program % SLOTS
    tl.atomic_add(slot, tl.sum((moved != 0).to(tl.float32), 0).to(tl.float64))
    tl.atomic_add(slot + SLOTS, tl.sum(moved * moved, 0).to(tl.float64))
