"""Rank processes and tiny models, started once for all distributed tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.gloo_ranks import RankPool
from tests.tiny_models import FAMILIES, make_tiny_model


@pytest.fixture(scope="session")
def one_rank() -> Iterator[RankPool]:
    pool = RankPool(1)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Family → model folder."""
    root = tmp_path_factory.mktemp("tiny_models")
    return {family: make_tiny_model(root / family, family) for family in FAMILIES}
