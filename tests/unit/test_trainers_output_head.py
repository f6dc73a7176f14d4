"""Log-probabilities with the projection: the fused function against fp64, and its kernels against PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grpo_lib.trainers.output_head import HeadOptions, TorchRows, fused_logprobs, project, projected_logprobs

N, D, V = 24, 16, 50


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden [N, D], weight [V, D], labels [N], upstream gradient [N]; one label is nearly certain."""
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(N, D, generator=generator).to(dtype)
    weight = torch.randn(V, D, generator=generator).to(dtype)
    labels = torch.randint(V, (N,), generator=generator)
    hidden[0] = weight[labels[0]] * 0.75
    upstream = torch.randn(N, generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), labels, upstream


def in_fp64(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, upstream: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, ...]:
    """logprobs, entropy, gradients of hidden and weight, from exactly these bfloat16 values."""
    h, w = (x.detach().double().requires_grad_() for x in (hidden, weight))
    distribution = torch.distributions.Categorical(logits=h @ w.T / temperature)
    logprobs = distribution.log_prob(labels)
    return (
        logprobs.detach(),
        distribution.entropy().detach(),
        *torch.autograd.grad(logprobs, (h, w), upstream.double()),
    )


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("chunk_tokens", [7, 100])
def test_fused_logprobs_with_an_fp32_head_equal_fp64(chunk_tokens: int, recompute: bool, temperature: float) -> None:
    hidden, weight, labels, upstream = inputs(torch.bfloat16)
    options = HeadOptions(temperature=temperature, chunk_tokens=chunk_tokens, recompute=recompute, fp32=True)
    logprobs, entropy = fused_logprobs(hidden, weight, labels, options, kernels=TorchRows())
    grads = torch.autograd.grad(logprobs, (hidden, weight), upstream)
    expected = in_fp64(hidden, weight, labels, upstream, temperature)
    torch.testing.assert_close(logprobs.double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected[1], rtol=1e-5, atol=1e-5)
    assert not entropy.requires_grad
    for grad, want in zip(grads, expected[2:], strict=True):
        assert grad.dtype is torch.bfloat16
        assert relative(grad, want) < 6e-3  # products of values rounded to 8 bits, rounded to 8 bits


def test_a_nearly_certain_label_keeps_its_gradient() -> None:
    """1 - p of a probability stored in bfloat16 would be 0 or several times too large."""
    hidden, weight, labels, _ = inputs(torch.bfloat16)
    only_first = torch.zeros(N)
    only_first[0] = 1
    options = HeadOptions(temperature=1.0, chunk_tokens=100, recompute=False, fp32=True)
    logprobs, _ = fused_logprobs(hidden, weight, labels, options, kernels=TorchRows())
    assert -1e-2 < float(logprobs[0]) < 0
    _, found = torch.autograd.grad(logprobs, (hidden, weight), only_first)
    expected = in_fp64(hidden, weight, labels, only_first, 1.0)[3]
    assert relative(found[labels[0]], expected[labels[0]]) < 6e-3


def test_the_fp32_head_is_what_removes_the_rounding_of_logits() -> None:
    hidden, weight, labels, upstream = inputs(torch.bfloat16)
    expected = in_fp64(hidden, weight, labels, upstream, 1.0)[0]
    worst = {}
    for fp32 in (False, True):
        options = HeadOptions(temperature=1.0, chunk_tokens=7, fp32=fp32)
        for name, (logprobs, _) in (
            ("plain", projected_logprobs(hidden, weight, labels, options)),
            ("fused", fused_logprobs(hidden, weight, labels, options, kernels=TorchRows())),
        ):
            worst[name, fp32] = float((logprobs.double() - expected).abs().max())
    assert min(worst["plain", False], worst["fused", False]) > 1e-3
    assert max(worst["plain", True], worst["fused", True]) < 1e-5


def test_an_fp32_head_changes_nothing_in_fp32() -> None:
    hidden, weight, _, _ = inputs(torch.float32)
    assert torch.equal(project(hidden, weight, fp32=True), project(hidden, weight, fp32=False))


def test_the_gradient_of_a_widened_projection_equals_fp64() -> None:
    hidden, weight, labels, upstream = inputs(torch.bfloat16)
    options = HeadOptions(temperature=0.7, chunk_tokens=7, fp32=True)
    logprobs, _ = projected_logprobs(hidden, weight, labels, options)
    expected = in_fp64(hidden, weight, labels, upstream, 0.7)
    for grad, want in zip(torch.autograd.grad(logprobs, (hidden, weight), upstream), expected[2:], strict=True):
        assert relative(grad, want) < 6e-3


def test_kept_probabilities_serve_one_backward_pass() -> None:
    hidden, weight, labels, upstream = inputs(torch.bfloat16)
    options = HeadOptions(temperature=1.0, chunk_tokens=7, recompute=False)
    logprobs, _ = fused_logprobs(hidden, weight, labels, options, kernels=TorchRows())
    logprobs.backward(upstream, retain_graph=True)
    with pytest.raises(AssertionError, match="second backward pass"):
        logprobs.backward(upstream)


def test_no_labels_still_reach_the_weights() -> None:
    hidden, weight, labels, _ = inputs(torch.bfloat16)
    options = HeadOptions(temperature=1.0, chunk_tokens=7, recompute=False, fp32=True)
    logprobs, _ = fused_logprobs(hidden[:0], weight, labels[:0], options, kernels=TorchRows())
    logprobs.sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_forbidden_words_and_bad_logits() -> None:
    logits = torch.tensor([[0.0, float("-inf"), 1.0], [0.0, float("nan"), 1.0]])
    logprobs, _, entropy = TorchRows().softmax_rows(logits, torch.tensor([2, 0]), 1.0, probs=None)
    p = torch.tensor([1.0, 2.718281828]) / 3.718281828
    assert float(logprobs[0]) == pytest.approx(float(p[1].log()), abs=1e-6)
    assert float(entropy[0]) == pytest.approx(float(-(p * p.log()).sum()), abs=1e-6)
    assert logprobs[1].isnan()


def test_the_triton_kernels_under_their_interpreter() -> None:
    """On a CPU, in a process of its own: the interpreter is chosen when Triton is imported."""
    pytest.importorskip("triton", reason="comes with CUDA builds of PyTorch")
    script = Path(__file__).with_name("interpreted_kernels.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(script.parents[2])}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["softmax_rows", "gradient_of_logits", "gradient_of_probs", "adamw"]
