import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import grpo_lib.algo.checksum as checksum_module
from grpo_lib.algo.checksum import NamedChecksums, checksum_digest, tensor_checksum, tensor_checksums

MASK = 2**64 - 1


def plain_checksum(values: torch.Tensor, chunk: int) -> int:
    """The same sum in Python integers."""

    def signed_shift(x: int) -> int:
        return ((x - 2**64 if x >> 63 else x) >> 29) & MASK

    def weight(i: int) -> int:
        x = (i + 1) * 0x9E3779B97F4A7C15 & MASK
        return ((x ^ signed_shift(x)) * 0xBF58476D1CE4E5B9 & MASK) | 1

    bits = values.flatten().numpy().view(np.int32).tolist()
    last = (len(bits) - 1) // chunk
    factors = [pow(0x94D049BB133111EB, last - i // chunk, 2**64) for i in range(len(bits))]
    return sum(b * weight(i % chunk) * factors[i] for i, b in enumerate(bits)) & MASK


@pytest.fixture
def tensor() -> torch.Tensor:
    return torch.randn(7, 5, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("chunk", [1 << 20, 8])
def test_equals_the_sum_in_python_integers(tensor: torch.Tensor, chunk: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checksum_module, "_CHUNK", chunk)
    assert tensor_checksum(tensor) == plain_checksum(tensor, chunk)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool])
def test_every_single_bit_flip_changes_it(dtype: torch.dtype):
    values = (torch.randn(3, 4, generator=torch.Generator().manual_seed(1)) * 10).to(dtype)
    before = tensor_checksum(values)
    raw = values.flatten().view(torch.uint8)
    bits = 1 if dtype is torch.bool else 8  # a bool byte has one meaningful bit
    for byte in range(raw.numel()):
        for bit in range(bits):
            raw[byte] ^= 1 << bit
            assert tensor_checksum(values) != before
            raw[byte] ^= 1 << bit
    assert tensor_checksum(values) == before


@pytest.mark.parametrize("chunk", [1 << 20, 4])
def test_every_swap_of_two_elements_and_of_two_rows_changes_it(
    tensor: torch.Tensor, chunk: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(checksum_module, "_CHUNK", chunk)
    before, flat = tensor_checksum(tensor), tensor.flatten()
    for i in range(len(flat)):
        for j in range(i):
            swapped = flat.clone()
            swapped[[i, j]] = flat[[j, i]]
            assert tensor_checksum(swapped) != before
    assert tensor_checksum(tensor[torch.tensor([1, 0, 2, 3, 4, 5, 6])]) != before


def test_rows_with_equal_bit_sums_cannot_be_swapped_unnoticed():
    """With weights linear in the position this change is invisible."""
    rows = torch.tensor([[1, 4], [3, 2]], dtype=torch.int32)
    linear = torch.tensor([[1, 3], [5, 7]])
    assert (rows * linear).sum() == (rows.flip(0) * linear).sum()
    assert tensor_checksum(rows) != tensor_checksum(rows.flip(0))


def test_layout_does_not_matter_and_signed_zero_does(tensor: torch.Tensor):
    assert tensor_checksum(tensor.t()) == tensor_checksum(tensor.t().contiguous())
    assert tensor_checksum(torch.nn.Parameter(tensor)) == tensor_checksum(tensor)
    assert tensor_checksum(torch.tensor([0.0])) != tensor_checksum(torch.tensor([-0.0]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.float32])
def test_the_tensor_is_left_as_it_was(dtype: torch.dtype):
    values = torch.arange(1, 9).to(dtype)
    tensor_checksum(values)
    assert torch.equal(values, torch.arange(1, 9).to(dtype))


def test_scalars_empties_and_several_at_once(tensor: torch.Tensor):
    scalar, empty = torch.tensor(3.0), torch.zeros(0)
    assert tensor_checksums([tensor, scalar, empty]) == [tensor_checksum(t) for t in (tensor, scalar, empty)]
    assert tensor_checksum(empty) == 0
    assert tensor_checksums([]) == []
    assert 0 <= tensor_checksum(-tensor.abs()) < 2**64


def test_named_checksums_see_bits_dtype_and_shape(tensor: torch.Tensor):
    def named(*pairs: tuple[str, torch.Tensor]) -> dict[str, int]:
        checksums = NamedChecksums()
        for pair in pairs:
            checksums.add([pair])
        return checksums.read()

    (plain,) = named(("w", tensor)).values()
    assert named(("w", tensor.clone()), ("v", tensor)) == {"w": plain, "v": plain}
    for other in (tensor.view(torch.int32), tensor.reshape(5, 7), tensor.flatten(), -tensor):
        assert named(("w", other)) != {"w": plain}


def test_the_triton_kernel_under_its_interpreter():
    """On a CPU, in a process of its own: the interpreter is chosen when Triton is imported."""
    pytest.importorskip("triton", reason="comes with CUDA builds of PyTorch")
    script = Path(__file__).with_name("interpreted_checksum.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(script.parents[2])}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["float32", "bfloat16", "float64", "int8"]


def test_a_wrapped_tensor_is_refused():
    """A sharded tensor's local bits would pass for the whole."""

    class Sharded(torch.Tensor):
        pass

    with pytest.raises(ValueError, match=r"Sharded.*gather it"):
        tensor_checksum(torch.zeros(2).as_subclass(Sharded))


def test_values_never_change():
    """Two machines compare these; a changed formula would make every stored certificate look like corruption."""
    assert tensor_checksum(torch.arange(6, dtype=torch.float32)) == 3669959039579586560
    assert checksum_digest({"b": 2, "a": 1}) == checksum_digest({"a": 1, "b": 2})
    assert checksum_digest({"a": 1, "b": 2}) != checksum_digest({"a": 2, "b": 1})
    assert checksum_digest({"a": 1}) == "5c59de626c044adf5491dd2d6ab8f21566a89f3f056548e8ec466dd943ae4cfa"
