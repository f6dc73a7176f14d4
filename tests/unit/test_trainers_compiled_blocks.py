"""A block that needs one graph too many is an error, and not a block that computes otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo import config as dynamo

from grpo_lib.errors import GrpoError
from grpo_lib.trainers import compiled_blocks


class Power(torch.nn.Module):
    """A graph for each exponent."""

    exponent = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x**self.exponent


@pytest.fixture(autouse=True)
def few_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    with dynamo.patch(recompile_limit=1, fail_on_recompile_limit_hit=False):
        yield
    torch._dynamo.reset()


def compiled_twice() -> torch.Tensor:
    block, x = Power(), torch.full((3,), 2.0)
    block.compile(backend="eager")
    block(x)
    block.exponent = 3.0
    with compiled_blocks.explained_recompile_limit():
        return block(x)


def test_one_graph_too_many_is_an_error_that_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_blocks, "GRAPHS", 1)
    assert compiled_twice().tolist() == [8, 8, 8], "else nothing would be hidden"
    torch._dynamo.reset()
    compiled_blocks.refuse_eager_blocks()
    with pytest.raises(GrpoError, match=r"compiled 1 times.*trainer\.compile=false"):
        compiled_twice()


def test_blocks_may_have_as_many_graphs_as_a_policy_and_a_reference_need() -> None:
    compiled_blocks.refuse_eager_blocks()
    assert dynamo.recompile_limit == compiled_blocks.GRAPHS
    assert compiled_twice().tolist() == [8, 8, 8]
