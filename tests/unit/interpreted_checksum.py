"""Run with TRITON_INTERPRET=1: the kernel against the formula in PyTorch on a CPU. Prints the dtypes that held."""

from __future__ import annotations

import torch

import grpo_lib.algo.checksum as formula
from grpo_lib.algo import checksum_kernel

SHAPES = {64: [(3,), (64,), (65,), (700,), (0,), (16, 16), (1,), ()], 1 << 20: [(5000,), (3, 7)]}


def check(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for chunk, shapes in SHAPES.items():
        formula._CHUNK = chunk
        tensors = [(10 * torch.randn(shape, generator=generator)).to(dtype) for shape in shapes]
        tensors.append(torch.randn(101, generator=generator).to(dtype)[1:])  # not aligned
        bits = [formula._bits(tensor) for tensor in tensors]
        found = checksum_kernel.checksums(
            bits,
            chunk=chunk,
            chunk_factor=formula._signed(formula._CHUNK_FACTOR),
            mix=(formula._signed(formula._MIX_A), formula._signed(formula._MIX_B)),
        )
        assert found.tolist() == [int(formula._checksum(b)) for b in bits], (dtype, chunk)


if __name__ == "__main__":
    for name in ("float32", "bfloat16", "float64", "int8"):
        check(getattr(torch, name))
        print(name)  # noqa: T201 read by the test
