"""Run with TRITON_INTERPRET=1: the Triton kernels against PyTorch on a CPU. Prints what held, one word each."""

from __future__ import annotations

import torch

from grpo_lib.trainers import adamw_kernel, logprob_kernels
from grpo_lib.trainers.output_head import TorchRows

N, V = 5, 9000  # three parts of a row, the last one short
BF16_STEP = 2**-8


def check_rows(dtype: torch.dtype, temperature: float) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = (4 * torch.randn(N, V, generator=generator)).to(dtype)
    logits[1, 3] = float("-inf")
    labels = torch.randint(4, V, (N,), generator=generator)
    labels[0] = V - 1
    scale = torch.randn(N, generator=generator)
    plain = TorchRows()
    found_probs, expected_probs = (torch.empty(N, V, dtype=torch.bfloat16) for _ in range(2))
    found = logprob_kernels.softmax_rows(logits, labels, temperature, probs=found_probs)
    expected = plain.softmax_rows(logits, labels, temperature, probs=expected_probs)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-5)
    torch.testing.assert_close(found_probs, expected_probs, rtol=2 * BF16_STEP, atol=1e-12)
    in_place = logits.clone()
    logprob_kernels.softmax_rows(in_place, labels, temperature, probs=in_place)
    torch.testing.assert_close(in_place.float(), expected_probs.float(), rtol=3 * BF16_STEP, atol=1e-7)
    logprobs, normalisers, _ = expected
    found_out, expected_out = (torch.empty(N, V, dtype=torch.bfloat16) for _ in range(2))
    for kernels, out in ((logprob_kernels, found_out), (plain, expected_out)):
        kernels.gradient_of_logits(logits, labels, logprobs, normalisers, scale, temperature, out=out)
    torch.testing.assert_close(found_out, expected_out, rtol=2 * BF16_STEP, atol=1e-12)
    logprob_kernels.gradient_of_probs(found_probs, labels, logprobs, scale)
    torch.testing.assert_close(found_probs, expected_out, rtol=4 * BF16_STEP, atol=1e-12)


def check_adamw(sizes: tuple[int, ...], gradient_dtype: torch.dtype) -> None:
    """Tensors of several programs and of a part of one, with a rounded copy where gradients are rounded."""
    generator = torch.Generator().manual_seed(2)
    max_norm, has_copy = 0.5, gradient_dtype is torch.bfloat16
    weights = [torch.randn(size, generator=generator) for size in sizes]
    copies = [torch.zeros_like(weight, dtype=torch.bfloat16) for weight in weights]
    moments = [(torch.zeros_like(weight), torch.zeros_like(weight)) for weight in weights]
    expected = [torch.nn.Parameter(weight.clone()) for weight in weights]
    adamw = torch.optim.AdamW(expected, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for step in (1, 2, 3):
        gradients = [torch.randn(size, generator=generator).to(gradient_dtype) for size in sizes]
        norm = torch.cat(gradients).double().norm().float()
        torch.testing.assert_close(adamw_kernel.total_norm(gradients), norm, rtol=1e-6, atol=0)
        for parameter, gradient in zip(expected, gradients, strict=True):
            parameter.grad = gradient.float() * (max_norm / (norm + 1e-6))
        adamw.step()
        before, change = torch.cat(weights), adamw_kernel.no_change(norm.device)
        settings = adamw_kernel.Settings.of(adamw.param_groups[0], step=step)
        options = {"settings": settings, "max_norm": max_norm, "change": change}
        updates = [
            (adamw_kernel.Held(weight=w, exp_avg=m, exp_avg_sq=v, copy=c if has_copy else None), g)
            for w, g, (m, v), c in zip(weights, gradients, moments, copies, strict=True)
        ]
        adamw_kernel.update(updates, norm=norm, **options)
        for weight, other, copy in zip(weights, expected, copies, strict=True):
            torch.testing.assert_close(weight, other.detach(), rtol=0, atol=5e-7)
            if has_copy:  # the interpreter truncates, a GPU rounds
                torch.testing.assert_close(copy.float(), weight, rtol=2 * BF16_STEP, atol=0)
        moved = (torch.cat(weights) - before).double()
        num_changed, sum_of_squares = change.sum(1).tolist()
        assert num_changed == int(moved.count_nonzero()) > 0
        assert abs(sum_of_squares / float(moved.square().sum()) - 1) < 1e-5
        for bad in ("nan", "inf"):
            kept = [t.clone() for held, g in updates for t in held.with_gradient(g)]
            change.zero_()
            adamw_kernel.update(updates, norm=torch.tensor(float(bad)), **options)
            found = [t for held, g in updates for t in held.with_gradient(g)]
            assert all(torch.equal(a, b) for a, b in zip(kept, found, strict=True))
            assert not change.any()


if __name__ == "__main__":
    for case in ((torch.float32, 1.0), (torch.bfloat16, 0.7)):
        check_rows(*case)
    print("softmax_rows gradient_of_logits gradient_of_probs")  # noqa: T201 read by the test
    check_adamw((5000, 16, 1024, 48), torch.bfloat16)  # some elements are no multiple of what a thread loads
    check_adamw((4096, 16, 1024, 9216), torch.bfloat16)
    check_adamw((5, 1, 3000), torch.float32)
    print("adamw")  # noqa: T201
