"""Checksums of weights that two processes, on two devices, can compare without moving the weights.

The raw bits of element i, read as a signed integer of the element's size, are multiplied by an odd pseudo-random weight
of i and summed modulo 2^64. An odd weight makes any single flipped bit change the sum; weights that differ by position
make a permutation change it; integer sums do not depend on the order in which a device adds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch

_CHUNK = 1 << 20  # elements that share one set of weights; part of the formula
_INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIX_A, _MIX_B = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9  # odd constants of splitmix64
_CHUNK_FACTOR = 0x94D049BB133111EB  # odd: weights of one chunk are this multiple of the next one's


def tensor_checksum(tensor: torch.Tensor) -> int:
    """Checksum in [0, 2^64) of a plain tensor's bits; shape and dtype are compared elsewhere.

    Raises:
        ValueError: the tensor is sharded or otherwise wrapped, so its local bits are not its value.
    """
    return tensor_checksums([tensor])[0]


def tensor_checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Checksums of tensors on one device, with a single copy to the host at the end."""
    return read_checksums([device_checksums(tensors)])


def read_checksums(sums: Sequence[torch.Tensor]) -> list[int]:
    """Results of `device_checksums`, joined, as plain numbers; the one wait for the device."""
    if not sums:
        return []
    return [value % 2**64 for value in torch.cat(list(sums)).tolist()]


class NamedChecksums:
    """Checksums of tensors that pass by under a name: of their bits, dtype and shape.

    Without dtype and shape, float16 bits that a receiver was told to read as bfloat16 would agree with what was sent.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, int] = {}
        self._sums: list[torch.Tensor] = []
        self.num_bytes = 0

    def __contains__(self, name: str) -> bool:
        return name in self._kinds

    def add(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Start summing tensors of one device; nothing waits for it. They may change once its later work begins."""
        self._sums.append(device_checksums([tensor for _, tensor in tensors]))
        for name, tensor in tensors:
            self._kinds[name] = _kind(tensor.dtype, tuple(tensor.shape))
            self.num_bytes += tensor.nbytes

    def read(self) -> dict[str, int]:
        """Name → checksum in [0, 2^64), in the order added; waits for the device."""
        sums = zip(self._kinds.items(), read_checksums(self._sums), strict=True)
        return {name: (kind + value) % 2**64 for (name, kind), value in sums}


@lru_cache(maxsize=4096)
def _kind(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return int.from_bytes(hashlib.sha256(f"{dtype} {shape}".encode()).digest()[:8])


def checksum_digest(checksums: Mapping[str, int]) -> str:
    """sha256 hex over (name, checksum) pairs, whatever their order."""
    lines = "".join(f"{name} {checksums[name]:016x}\n" for name in sorted(checksums))
    return hashlib.sha256(lines.encode()).hexdigest()


def device_checksums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """[tensors] int64 on their device, of which `read_checksums` makes the numbers; nothing waits for the device.

    Raises:
        ValueError: as `tensor_checksum`.
    """
    bits = [_bits(tensor) for tensor in tensors]
    if bits and bits[0].is_cuda:
        from grpo_lib.algo import checksum_kernel  # needs Triton, which a CPU does not

        mix = (_signed(_MIX_A), _signed(_MIX_B))
        return checksum_kernel.checksums(bits, chunk=_CHUNK, chunk_factor=_signed(_CHUNK_FACTOR), mix=mix)
    return torch.stack([_checksum(tensor) for tensor in bits]) if bits else torch.zeros(0, dtype=torch.int64)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """[elements] signed integers of the element's size, contiguous."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise ValueError(
            f"checksum of a {type(tensor).__name__} {tuple(tensor.shape)}: gather it to a plain tensor first"
        )
    return tensor.detach().reshape(-1).view(_INT_OF_SIZE[tensor.element_size()])


def _checksum(bits: torch.Tensor) -> torch.Tensor:
    """[] int64 in PyTorch's operations."""
    weights = _weights(min(_CHUNK, bits.numel()), bits.device)
    whole = bits.numel() - bits.numel() % _CHUNK
    sums = [_chunk_sums(part[None], weights) for part in bits[:whole].split(_CHUNK) if part.numel()]
    if whole < bits.numel():
        rest = bits[whole:]
        sums.append(_chunk_sums(rest[None], weights[: rest.numel()]))
    if not sums:
        return torch.zeros((), dtype=torch.int64, device=bits.device)
    chunk_sums = torch.cat(sums)
    return (chunk_sums * _chunk_weights(len(chunk_sums), bits.device)).sum()


def _chunk_sums(chunks: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[chunks, n] bits, [n] weights → [chunks]."""
    return chunks.to(torch.int64, copy=True).mul_(weights).sum(-1)  # int64 bits are the caller's own


def _chunk_weights(count: int, device: torch.device) -> torch.Tensor:
    """[count] powers of the factor, the last chunk's being 1."""
    powers = [1]
    for _ in range(count - 1):
        powers.append(powers[-1] * _CHUNK_FACTOR % 2**64)
    return torch.tensor([_signed(power) for power in reversed(powers)], dtype=torch.int64, device=device)


def _weights(count: int, device: torch.device) -> torch.Tensor:
    """[count] int64 odd weights. A plain 2 i + 1 would miss two swapped rows whose bits have equal sums."""
    x = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _signed(_MIX_A)
    x ^= x >> 29  # arithmetic shift: the same on every device
    return (x * _signed(_MIX_B)) | 1


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    return value - 2**64 if value >= 2**63 else value
