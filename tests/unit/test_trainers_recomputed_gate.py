"""What a compiled block keeps for its backward pass, counted in the graphs that are made of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from olmo_core.nn.feed_forward import FeedForward

from grpo_lib.trainers.olmo_core_model import _recompute_gate

HIDDEN, TOKENS = 48, 16


def kept_and_results(prepare: Callable[[FeedForward], None]) -> tuple[int, list[torch.Tensor]]:
    """The number of [tokens, hidden] tensors that are kept, then output and gradients."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    feed_forward = FeedForward(d_model=8, hidden_size=HIDDEN, bias=False)
    prepare(feed_forward)
    feed_forward.compile(backend="aot_eager_decomp_partition")
    x = torch.randn(1, TOKENS, 8, requires_grad=True)
    kept = set()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if HIDDEN in tensor.shape and TOKENS in tensor.shape:
            kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = feed_forward(x)
    out.square().sum().backward()
    grads = [parameter.grad for parameter in (x, *feed_forward.parameters())]
    return len(kept), [out.detach(), *(grad for grad in grads if grad is not None)]


@pytest.mark.filterwarnings("ignore")
def test_the_product_is_recomputed_and_nothing_else_changes() -> None:
    kept, results = kept_and_results(_recompute_gate)
    all_kept, expected = kept_and_results(lambda feed_forward: None)
    assert (kept, all_kept) == (2, 3)
    assert len(results) == 5
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
