"""Which kernel computes causal attention within packed documents on this device; both trainers use the same.

The kernels are for half precision on a GPU. Elsewhere there is none, and each trainer has its own way of keeping
PyTorch's dense attention inside documents.
"""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any, Protocol

import torch

_HALF = (torch.bfloat16, torch.float16)


class DocumentKernel(Protocol):
    """Causal attention within documents of one row."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_lens: torch.Tensor,
        max_len: int,
        scale: float | None,
    ) -> torch.Tensor:
        """q [N, heads, head_dim], k and v [N, kv heads, head_dim] → [N, heads, head_dim].

        Args:
            cu_lens: [documents + 1] int32, cumulative lengths, on the device.
            max_len: Longest document.
            scale: Of the scores; None is 1 / sqrt(head_dim).
        """
        ...


def document_kernel(device: torch.device, dtype: torch.dtype) -> DocumentKernel | None:
    """flash-attn where it is installed, else PyTorch's own copy of that kernel; None on a CPU and in fp32."""
    if device.type != "cuda" or dtype not in _HALF:
        return None
    return _flash_attn() if importlib.util.find_spec("flash_attn") else _torch_varlen()


def _flash_attn() -> DocumentKernel:
    from flash_attn import (  # pyright: ignore[reportMissingImports] optional, has no CPU build
        flash_attn_varlen_func,
    )

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_lens: torch.Tensor, max_len: int, scale: float | None
    ) -> torch.Tensor:
        return flash_attn_varlen_func(q, k, v, cu_lens, cu_lens, max_len, max_len, softmax_scale=scale, causal=True)

    return attend


def _torch_varlen() -> DocumentKernel:
    from torch.nn.attention.varlen import varlen_attn

    # PyTorch 2.11 takes fewer key heads than query heads as they come, 2.13 wants to be told.
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_lens: torch.Tensor, max_len: int, scale: float | None
    ) -> torch.Tensor:
        # A window of everything to the left and nothing to the right is what this kernel calls causal.
        return varlen_attn(  # pyright: ignore[reportReturnType] one tensor unless auxiliary results are asked for
            q, k, v, cu_lens, cu_lens, max_len, max_len, scale=scale, window_size=(-1, 0), **grouped
        )

    return attend
