"""How both trainers compile their transformer blocks: with the rounding of eager mode, and never half."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch._dynamo import config as dynamo
from torch._dynamo.exc import FailOnRecompileLimitHit

from grpo_lib.errors import GrpoError

# Graphs of one block in a process. A policy has one to score with and one to train with, a frozen reference one; each
# of them may be made a second time for a size that turned out to vary.
GRAPHS = 16


def compile_blocks(blocks: Iterable[torch.nn.Module], *, dynamic: bool | None = None) -> None:
    """Compile each block on its own; equal blocks share their graphs.

    A fused kernel keeps in fp32 what separate ones round to bfloat16 between them, so that the result would depend on
    what a compiler fuses. Here it rounds as eager mode and the engine do.

    Args:
        dynamic: Of `torch.compile`.
    """
    refuse_eager_blocks()
    for block in blocks:
        block.compile(dynamic=dynamic, options={"emulate_precision_casts": True})


def refuse_eager_blocks() -> None:
    """Make a block that would need one graph too many an error; PyTorch runs it eagerly, which rounds otherwise."""
    dynamo.recompile_limit = max(GRAPHS, dynamo.recompile_limit)
    dynamo.fail_on_recompile_limit_hit = True


@contextmanager
def explained_recompile_limit() -> Iterator[None]:
    """Name the way out where blocks needed one graph too many.

    Raises:
        GrpoError: of that.
    """
    try:
        yield
    except FailOnRecompileLimitHit as error:
        raise GrpoError(
            f"a block was compiled {dynamo.recompile_limit} times and needs another graph; eager mode would round "
            "otherwise than the graphs do. Keep fewer compiled models in a process (one policy and one reference need "
            "6 graphs), find what varies with TORCH_LOGS=recompiles, or set trainer.compile=false"
        ) from error
