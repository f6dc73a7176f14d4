from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_lib.algo.logprobs import logits_logprobs, token_logprobs

N, H, V, CHUNK = 96, 8, 160, 16


class LargestWide(TorchDispatchMode):
    """Elements of the largest fp32 (or wider) floating tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.float64):
                self.largest = max(self.largest, value.numel())
        return result


def inputs(dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden [N, H], head [V, H], labels [N], upstream gradient [N]."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, H, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    head = torch.randn(V, H, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(V, (N,), generator=generator)
    return hidden, head, labels, torch.randn(N, generator=generator, dtype=torch.float64)


def unchunked(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    distribution = torch.distributions.Categorical(logits=logits.double() / temperature)
    return distribution.log_prob(labels), distribution.entropy()


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("chunk_tokens", [13, 96, 1000])
def test_values_and_gradients_equal_the_unchunked_formula_in_fp64(temperature: float, chunk_tokens: int):
    hidden, head, labels, upstream = inputs(torch.float64)
    expected, expected_entropy = unchunked(hidden @ head.T, labels, temperature)
    expected_grads = torch.autograd.grad(expected, (hidden, head), upstream)
    logprobs, entropy = token_logprobs(
        hidden, lambda h: h @ head.T, labels, temperature=temperature, chunk_tokens=chunk_tokens
    )
    grads = torch.autograd.grad(logprobs, (hidden, head), upstream)
    torch.testing.assert_close(logprobs, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-12, atol=1e-12)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-11, atol=1e-12)
    assert not entropy.requires_grad


def test_backward_accumulates_into_the_parameters_of_the_head():
    hidden, head, labels, upstream = inputs(torch.float64)
    (unchunked(hidden @ head.T, labels, 1.0)[0] * upstream).sum().backward()
    expected = head.grad
    head.grad = None
    logprobs, _ = token_logprobs(hidden.detach(), lambda h: h @ head.T, labels, temperature=1.0, chunk_tokens=CHUNK)
    (logprobs * upstream).sum().backward()
    torch.testing.assert_close(head.grad, expected, rtol=1e-11, atol=1e-12)


def test_hand_worked_temperature():
    """open-instruct 1678: logits ln 4 and 0 at temperature 2 are ln 2 and 0, so p = 2/3, not 4/5."""
    logits = torch.tensor([[4.0, 1.0]]).log()
    logprobs, entropy = logits_logprobs(logits, torch.tensor([0]), temperature=2.0, chunk_tokens=8)
    third, two_thirds = torch.tensor([1 / 3]), torch.tensor([2 / 3])
    torch.testing.assert_close(logprobs, two_thirds.log())
    torch.testing.assert_close(entropy, -(third * third.log() + two_thirds * two_thirds.log()))


def test_bf16_logits_are_normalised_in_fp32():
    hidden, head, labels, _ = inputs(torch.bfloat16)
    logits = (hidden @ head.T).detach()
    expected, _ = unchunked(logits, labels, 1.0)
    logprobs, _ = logits_logprobs(logits, labels, temperature=1.0, chunk_tokens=CHUNK)
    assert logprobs.dtype == torch.float32
    assert (logprobs - expected).abs().max() < 2e-6
    in_bf16 = torch.log_softmax(logits, -1).gather(-1, labels[:, None])[:, 0]
    assert (in_bf16 - expected).abs().max() > 1e-3, "the comparison would notice a bf16 softmax"


def from_hidden(logprob_inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], chunk: int) -> torch.Tensor:
    hidden, head, labels = logprob_inputs
    return token_logprobs(hidden, lambda h: h @ head.T, labels, temperature=0.7, chunk_tokens=chunk)[0]


def from_logits(logprob_inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], chunk: int) -> torch.Tensor:
    hidden, head, labels = logprob_inputs
    return logits_logprobs(hidden @ head.T, labels, temperature=0.7, chunk_tokens=chunk)[0]


@pytest.mark.parametrize("score", [from_hidden, from_logits])
def test_fp32_tokens_by_vocab_never_exists_forward_or_backward(score: Callable[..., torch.Tensor]):
    hidden, head, labels, _ = inputs(torch.bfloat16)
    with LargestWide() as mode:
        logprobs = score((hidden, head, labels), CHUNK)
        logprobs.sum().backward()
    assert hidden.grad is not None
    assert mode.largest == CHUNK * V
    with LargestWide() as mode:  # sabotage: one chunk of all tokens
        score((hidden, head, labels), N).sum().backward()
    assert mode.largest == N * V


def test_from_hidden_states_no_logits_outlive_their_chunk():
    hidden, head, labels, _ = inputs(torch.float32)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        logprobs = from_hidden((hidden, head, labels), CHUNK)
    assert sum(kept) < CHUNK * V, "autograd keeps less than one chunk of logits"
    logprobs.sum().backward()


def test_forbidden_tokens_leave_entropy_and_gradient_finite():
    logits = torch.tensor([[0.0, float("-inf"), 0.0]], requires_grad=True)
    logprobs, entropy = logits_logprobs(logits, torch.tensor([2]), temperature=1.0, chunk_tokens=4)
    logprobs.sum().backward()
    torch.testing.assert_close(entropy, torch.tensor([2.0]).log())
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.5, 0.0, 0.5]]))


def test_without_gradients_the_result_is_the_same_and_has_no_graph():
    hidden, head, labels, _ = inputs(torch.float32)
    with torch.no_grad():
        logprobs = from_hidden((hidden, head, labels), CHUNK)
    assert not logprobs.requires_grad
    torch.testing.assert_close(logprobs, from_hidden((hidden, head, labels), CHUNK).detach(), rtol=0, atol=0)


def test_wrong_shapes_and_settings_are_refused():
    hidden, head, labels, _ = inputs(torch.float32)
    with pytest.raises(ValueError, match=r"labels \(95,\)"):
        logits_logprobs(hidden @ head.T, labels[1:], temperature=1.0, chunk_tokens=4)
    with pytest.raises(ValueError, match=r"temperature \(0.0\)"):
        logits_logprobs(hidden @ head.T, labels, temperature=0.0, chunk_tokens=4)


def test_no_tokens_at_all_still_give_a_graph_to_the_head():
    """A rank whose micro-batch is all padding projects nothing, and its backward pass must run all the same."""
    hidden, head, labels, _ = inputs(torch.float32)
    logprobs, entropy = token_logprobs(
        hidden[:0], lambda h: h @ head.T, labels[:0], temperature=1.0, chunk_tokens=CHUNK
    )
    logprobs.sum().backward()
    assert logprobs.shape == entropy.shape == (0,)
    assert head.grad is not None
    assert not head.grad.any()
