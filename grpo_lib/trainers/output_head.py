"""Hidden states and the output matrix → log-probabilities of labels, the same in both trainers and the plain scorer.

On a CPU and in fp32 this is `algo.logprobs`. In half precision on a GPU that would read and write each chunk's fp32
logits some twenty times, and add up a gradient of the whole matrix for each chunk. There, one function covers the
projection too: its kernels pass over a chunk twice in the forward and once in the backward pass, and the gradients of
matrix and hidden states are one product each.

With an fp32 head the products are of bfloat16 values, but they are added up and handed over in fp32: log-probabilities
lose the rounding of logits to 8 bits, which is most of what engine and trainer differ by.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from grpo_lib.algo.logprobs import token_logprobs

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOptions:
    """How labels are scored; equal for all forward passes of a trainer."""

    temperature: float
    chunk_tokens: int  # rows of fp32 logits that exist at a time
    recompute: bool = True  # project again in the backward pass, instead of keeping [tokens, vocabulary] in bfloat16
    fp32: bool = False  # fp32 logits of bfloat16 hidden states; fp32 models have them anyway


def projected_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, options: HeadOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy of each label.

    Args:
        hidden: [n, D].
        weight: [V, D], whole in the backward pass too.
        labels: [n] int64.

    Returns:
        logprobs [n] float32 with gradient, entropy [n] float32 without.
    """
    if hidden.is_cuda and hidden.dtype in _HALF:
        from grpo_lib.trainers import logprob_kernels

        return fused_logprobs(hidden, weight, labels, options, kernels=cast("RowKernels", logprob_kernels))
    return token_logprobs(
        hidden,
        lambda rows: project(rows, weight, fp32=options.fp32),
        labels,
        temperature=options.temperature,
        chunk_tokens=options.chunk_tokens,
        recompute=options.recompute,
    )


def project(hidden: torch.Tensor, weight: torch.Tensor, *, fp32: bool) -> torch.Tensor:
    """[n, D] and [V, D] → logits [n, V], in fp32 or in the dtype of the hidden states; differentiable.

    On a GPU the fp32 form has no gradient: that one is part of `fused_logprobs`.
    """
    if not fp32 or hidden.dtype not in _HALF:
        return torch.nn.functional.linear(hidden, weight)
    if hidden.is_cuda:
        assert not torch.is_grad_enabled() or not (hidden.requires_grad or weight.requires_grad)
        return wide_product(hidden, weight.t())
    return torch.nn.functional.linear(hidden.float(), weight.float())


def wide_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b in fp32 of half-precision matrices, without fp32 copies of them where the device can; no gradient."""
    if a.is_cuda and a.dtype in _HALF:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


class RowKernels(Protocol):
    """What `fused_logprobs` does with a chunk of logits; `logprob_kernels` on a GPU, `TorchRows` as its reference."""

    def softmax_rows(
        self, logits: torch.Tensor, labels: torch.Tensor, temperature: float, *, probs: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[n, V] logits → logprobs, log normalisers and entropies, each [n] float32.

        Args:
            probs: [n, V] that takes the probabilities; may be `logits` itself.
        """
        ...

    def gradient_of_probs(
        self, probs: torch.Tensor, labels: torch.Tensor, logprobs: torch.Tensor, scale: torch.Tensor
    ) -> None:
        """Turn probabilities [n, V] into scale · (one-hot(label) - probability), in place; scale is [n] float32."""
        ...

    def gradient_of_logits(
        self, logits: torch.Tensor, labels: torch.Tensor, logprobs: torch.Tensor, normalisers: torch.Tensor,
        scale: torch.Tensor, temperature: float, *, out: torch.Tensor,
    ) -> None:  # fmt: skip
        """The same from logits, into `out` [n, V], which may be `logits` itself."""
        ...


class TorchRows:
    """The row kernels in plain PyTorch, on any device."""

    def softmax_rows(
        self, logits: torch.Tensor, labels: torch.Tensor, temperature: float, *, probs: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scaled = logits.float() / temperature
        normalisers = scaled.logsumexp(-1)
        log_softmax = scaled - normalisers[:, None]
        weights = log_softmax.exp()
        if probs is not None:
            probs.copy_(weights)
        # A forbidden token has p = 0 and log p = -inf, whose product is NaN.
        entropy = -torch.where(weights > 0, weights * log_softmax, 0).sum(-1)
        return log_softmax.gather(-1, labels[:, None])[:, 0], normalisers, entropy

    def gradient_of_probs(
        self, probs: torch.Tensor, labels: torch.Tensor, logprobs: torch.Tensor, scale: torch.Tensor
    ) -> None:
        gradient = probs.float() * -scale[:, None]
        # From the log-probability: a stored probability near 1 leaves nothing of 1 - p.
        gradient.scatter_(-1, labels[:, None], (scale * -torch.expm1(logprobs))[:, None])
        probs.copy_(gradient)

    def gradient_of_logits(
        self, logits: torch.Tensor, labels: torch.Tensor, logprobs: torch.Tensor, normalisers: torch.Tensor,
        scale: torch.Tensor, temperature: float, *, out: torch.Tensor,
    ) -> None:  # fmt: skip
        gradient = (logits.float() / temperature - normalisers[:, None]).exp()
        self.gradient_of_probs(gradient, labels, logprobs, scale)
        out.copy_(gradient)


def fused_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, options: HeadOptions, *, kernels: RowKernels
) -> tuple[torch.Tensor, torch.Tensor]:
    """`projected_logprobs` with projection, normalisation and their gradients in one function."""
    keep = torch.is_grad_enabled() and not options.recompute
    result = _FusedLogprobs.apply(hidden, weight, labels, options, kernels, keep)
    return cast("tuple[torch.Tensor, torch.Tensor]", result)


class _FusedLogprobs(torch.autograd.Function):
    """Keeps probabilities [n, V] in half precision, or nothing of that size.

    Probabilities and not logits: rounding moves a probability by 0.4 %, whatever its logit, and the gradient of a logit
    is a probability that is rounded once more for the products.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        options: HeadOptions,
        kernels: RowKernels,
        keep: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        probs = hidden.new_empty(len(labels), len(weight)) if keep else None
        results = []
        for rows in _chunks(len(labels), options.chunk_tokens):
            kept = None if probs is None else probs[rows]
            if options.fp32:
                logits = wide_product(hidden[rows], weight.t())
            else:
                logits = torch.mm(hidden[rows], weight.t(), out=kept)  # kept ones turn into probabilities in place
            results.append(kernels.softmax_rows(logits, labels[rows], options.temperature, probs=kept))
            del logits  # or the next chunk's would stand beside them
        logprobs, normalisers, entropy = (torch.cat(parts) for parts in zip(*results, strict=True))
        ctx.save_for_backward(hidden, weight, labels, logprobs, normalisers)
        ctx.options, ctx.kernels, ctx.probs, ctx.is_kept = options, kernels, probs, keep
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, labels, logprobs, normalisers = ctx.saved_tensors
        scale = grads[0] / ctx.options.temperature
        if ctx.is_kept:
            assert ctx.probs is not None, "a second backward pass: the probabilities became gradients in place"
            gradient, ctx.probs = ctx.probs, None
            for rows in _chunks(len(labels), ctx.options.chunk_tokens):
                ctx.kernels.gradient_of_probs(gradient[rows], labels[rows], logprobs[rows], scale[rows])
            return gradient @ weight, gradient.t() @ hidden, None, None, None, None
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for rows in _chunks(len(labels), ctx.options.chunk_tokens):
            gradient = _recomputed_gradient(ctx, rows, hidden, weight, labels, logprobs, normalisers, scale)
            grad_hidden[rows] = gradient @ weight
            grad_weight += wide_product(gradient.t(), hidden[rows])
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def _recomputed_gradient(
    ctx: Any,
    rows: slice,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    logprobs: torch.Tensor,
    normalisers: torch.Tensor,
    scale: torch.Tensor,
) -> torch.Tensor:
    """Gradient [rows, V] of a chunk's logits in the dtype of the hidden states."""
    own = hidden[rows]
    logits = wide_product(own, weight.t()) if ctx.options.fp32 else torch.mm(own, weight.t())
    out = torch.empty_like(logits, dtype=hidden.dtype) if ctx.options.fp32 else logits
    ctx.kernels.gradient_of_logits(
        logits, labels[rows], logprobs[rows], normalisers[rows], scale[rows], ctx.options.temperature, out=out
    )
    return out


def _chunks(num_rows: int, size: int) -> list[slice]:
    """At least one, so that no rows give results of no rows."""
    return [slice(start, min(start + size, num_rows)) for start in range(0, max(num_rows, 1), size)]
