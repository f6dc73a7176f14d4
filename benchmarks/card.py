"""The GPU as the parts of a benchmark share it: one at a time, and how fast it is at this moment."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def the_card(lock: Path | None) -> Iterator[None]:
    """Hold the card alone. Import what takes long before entering: others measure meanwhile.

    Args:
        lock: File that all who share the card agree on; None where nobody else uses it.
    """
    if lock is None:
        yield
        return
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def product_tflops() -> float:
    """Of a large bfloat16 product, before and after a measurement: a card that slowed down is seen as such."""
    import torch

    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.empty_like(a)
    for _ in range(3):
        torch.mm(a, a, out=b)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        torch.mm(a, a, out=b)
    torch.cuda.synchronize()
    return 10 * 2 * 8192**3 / (time.perf_counter() - start) / 1e12
