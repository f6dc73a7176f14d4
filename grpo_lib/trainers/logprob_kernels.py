"""The row kernels of `output_head.fused_logprobs` in Triton: one program per row or per part of a row.

A vocabulary does not fit a program's registers, so the normaliser is found online: every lane keeps the maximum, the
sum of exponentials and their weighted sum of the words it has seen, and rescales them when its maximum grows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_WORDS = 4096  # of a row at a time
_WARPS = 8


def softmax_rows(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, *, probs: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `output_head.RowKernels`."""
    num_rows, num_words = logits.shape
    logprobs, normalisers, entropy = (logits.new_empty(num_rows, dtype=torch.float32) for _ in range(3))
    if num_rows:
        _softmax_rows[(num_rows,)](
            logits, labels, logprobs, normalisers, entropy, logits if probs is None else probs,
            logits.stride(0), 0 if probs is None else probs.stride(0), num_words, temperature,
            KEEP=probs is not None, WORDS=_WORDS,
            num_warps=_WARPS,  # pyright: ignore[reportCallIssue] an argument of the launch
        )  # fmt: skip
    return logprobs, normalisers, entropy


def gradient_of_probs(probs: torch.Tensor, labels: torch.Tensor, logprobs: torch.Tensor, scale: torch.Tensor) -> None:
    """See `output_head.RowKernels`."""
    _gradient(probs, labels, logprobs, logprobs, scale, 1.0, out=probs, is_probs=True)


def gradient_of_logits(
    logits: torch.Tensor,
    labels: torch.Tensor,
    logprobs: torch.Tensor,
    normalisers: torch.Tensor,
    scale: torch.Tensor,
    temperature: float,
    *,
    out: torch.Tensor,
) -> None:
    """See `output_head.RowKernels`."""
    _gradient(logits, labels, logprobs, normalisers, scale, temperature, out=out, is_probs=False)


def _gradient(
    source: torch.Tensor,
    labels: torch.Tensor,
    logprobs: torch.Tensor,
    normalisers: torch.Tensor,
    scale: torch.Tensor,
    temperature: float,
    *,
    out: torch.Tensor,
    is_probs: bool,
) -> None:
    num_rows, num_words = source.shape
    if num_rows:
        _gradient_rows[(num_rows, triton.cdiv(num_words, _WORDS))](
            source, labels, logprobs, normalisers, scale.contiguous(), out,
            source.stride(0), out.stride(0), num_words, temperature,
            IS_PROBS=is_probs, WORDS=_WORDS,
            num_warps=_WARPS,  # pyright: ignore[reportCallIssue] an argument of the launch
        )  # fmt: skip


@triton.jit
def _softmax_rows(
    logits, labels, logprobs, normalisers, entropy, probs, logits_stride, probs_stride, num_words, temperature,
    KEEP: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    label = tl.load(logits + tl.load(labels + row)).to(tl.float32) / temperature
    lanes = tl.arange(0, WORDS)
    # A finite floor: the difference of two infinities would be NaN where a lane has seen forbidden words only.
    largest = tl.full((WORDS,), -1e30, tl.float32)
    total = tl.zeros((WORDS,), tl.float32)
    weighted = tl.zeros((WORDS,), tl.float32)
    for start in range(0, num_words, WORDS):
        words = start + lanes
        x = tl.load(logits + words, mask=words < num_words, other=-float("inf")).to(tl.float32) / temperature
        new_largest = tl.maximum(largest, x)
        shrink = tl.exp(largest - new_largest)
        e = tl.exp(x - new_largest)
        total = total * shrink + e
        weighted = weighted * shrink + tl.where(e > 0, x * e, 0.0)
        largest = new_largest
    top = tl.max(largest, 0)
    shrink = tl.exp(largest - top)
    sum_of_all = tl.sum(total * shrink, 0)
    normaliser = top + tl.log(sum_of_all)
    tl.store(logprobs + row, label - normaliser)
    tl.store(normalisers + row, normaliser)
    tl.store(entropy + row, normaliser - tl.sum(weighted * shrink, 0) / sum_of_all)
    if KEEP:
        probs += row * probs_stride
        for start in range(0, num_words, WORDS):
            words = start + lanes
            x = tl.load(logits + words, mask=words < num_words, other=-float("inf")).to(tl.float32) / temperature
            p = tl.exp(x - normaliser)
            tl.store(probs + words, p.to(probs.dtype.element_ty), mask=words < num_words)


@triton.jit
def _gradient_rows(
    source, labels, logprobs, normalisers, scale, out, source_stride, out_stride, num_words, temperature,
    IS_PROBS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    words = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    inside = words < num_words
    p = tl.load(source + row * source_stride + words, mask=inside, other=0.0).to(tl.float32)
    if not IS_PROBS:
        p = tl.exp(p / temperature - tl.load(normalisers + row))
    factor = tl.load(scale + row)
    # From the log-probability: a stored probability near 1 leaves nothing of 1 - p.
    of_label = factor * (1 - tl.exp(tl.load(logprobs + row)))
    gradient = tl.where(words == tl.load(labels + row), of_label, -factor * p)
    tl.store(out + row * out_stride + words, gradient.to(out.dtype.element_ty), mask=inside)
