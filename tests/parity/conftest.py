"""Stored steps and healthy trainers, made once for the suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.distributed.gloo_ranks import RankPool
from tests.parity.lab import Lab


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    torch.set_num_threads(1)
    pools: list[RankPool] = []

    def pool() -> RankPool:
        if not pools:
            pools.append(RankPool(2))
        return pools[0]

    yield Lab(tmp_path_factory.mktemp("lab"), pool)
    for started in pools:
        started.close()
