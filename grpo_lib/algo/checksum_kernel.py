"""The checksum in Triton: all tensors in one pass over their bytes, with the sums of `checksum` bit for bit.

Weights of positions are the same in every chunk, and the factor of a chunk is a power of one number. So a program takes
the same few positions of all chunks, joins them by Horner's rule, and multiplies by weights that it makes once. That
leaves one multiplication for each element: memory is the limit, not arithmetic.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_POSITIONS = 2048  # of a program
_WARPS = 4
_UNROLLED = 4  # chunks whose loads are under way together
_VECTOR_BYTES = 16
_INTS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


def checksums(tensors: Sequence[torch.Tensor], *, chunk: int, chunk_factor: int, mix: tuple[int, int]) -> torch.Tensor:
    """[tensors] int64 on their device; nothing waits for it.

    Args:
        tensors: Contiguous, all on one device.
        chunk: Elements that share one set of weights.
        chunk_factor: A chunk counts this many times as much as the next; an int64, as are both of `mix`.
    """
    device = tensors[0].device
    sums = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    alike: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        assert tensor.is_contiguous(), tensor.stride()
        if tensor.numel():
            vectors = tensor.data_ptr() % _VECTOR_BYTES == 0 and tensor.nbytes % _VECTOR_BYTES == 0
            alike[tensor.element_size(), vectors].append(index)
    positions = min(_POSITIONS, chunk)
    assert chunk % positions == 0, chunk
    for (size, vectors), indices in alike.items():
        rows = [[tensors[i].data_ptr() for i in indices], [tensors[i].numel() for i in indices], indices]
        table = torch.tensor(rows, dtype=torch.int64)
        if device.type == "cuda":  # from pageable memory the copy would wait for the device
            table = table.pin_memory().to(device, non_blocking=True)
        blocks = triton.cdiv(min(chunk, max(rows[1])), positions)
        _add_up[(len(indices) * blocks,)](
            table, sums, len(indices), blocks, CHUNK_FACTOR=chunk_factor, MIX_A=mix[0], MIX_B=mix[1], CHUNK=chunk,
            POSITIONS=positions, INT=_INTS[size], VECTOR=_VECTOR_BYTES // size if vectors else 1,
            UNROLLED=_UNROLLED,
            num_warps=_WARPS,  # pyright: ignore[reportCallIssue] an argument of the launch
        )  # fmt: skip
    return sums


@triton.jit(do_not_specialize=["num_tensors", "blocks"])  # else some numbers of tensors are compiled for anew
def _add_up(
    table, sums, num_tensors, blocks, CHUNK_FACTOR: tl.constexpr, MIX_A: tl.constexpr, MIX_B: tl.constexpr,
    CHUNK: tl.constexpr, POSITIONS: tl.constexpr, INT: tl.constexpr, VECTOR: tl.constexpr, UNROLLED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    start = tl.load(table + row).to(tl.pointer_type(INT))  # pyright: ignore[reportArgumentType] a dtype when compiled
    num_elements = tl.load(table + num_tensors + row)
    if VECTOR > 1:  # else the compiler takes no address for aligned
        start = tl.multiple_of(start, 16)
        num_elements = tl.multiple_of(num_elements, VECTOR)
    first = block.to(tl.int64) * POSITIONS
    if first < num_elements:
        places = first + tl.arange(0, POSITIONS)
        whole_chunks = num_elements // CHUNK
        joined = tl.zeros((POSITIONS,), dtype=tl.int64)
        for chunk in tl.range(0, whole_chunks, loop_unroll_factor=UNROLLED):
            joined = joined * CHUNK_FACTOR + tl.load(start + chunk * CHUNK + places).to(tl.int64)
        rest = whole_chunks * CHUNK
        if rest < num_elements:
            bits = tl.load(start + rest + places, mask=rest + places < num_elements, other=0)
            joined = joined * CHUNK_FACTOR + bits.to(tl.int64)
        x = (places + 1) * MIX_A
        x ^= x >> 29
        total = tl.sum(joined * ((x * MIX_B) | 1), 0)
        tl.atomic_add(sums + tl.load(table + 2 * num_tensors + row), total)
