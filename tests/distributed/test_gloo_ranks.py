"""The pool of ranks stays in step with its tests, whatever one of them did."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from tests.distributed.gloo_ranks import RankPool


def late(rank: int, num_ranks: int) -> str:
    time.sleep(3.0)
    return "an earlier result"


def prompt(rank: int, num_ranks: int) -> str:
    return "a result of its own"


def dies(rank: int, num_ranks: int) -> None:
    os._exit(1)


@pytest.fixture
def pool() -> Iterator[RankPool]:
    pool = RankPool(1)
    yield pool
    pool.close()


def test_a_job_after_one_that_took_too_long_gets_its_own_result(pool: RankPool) -> None:
    pool.run(prompt)  # the rank has started
    with pytest.raises(TimeoutError, match="did not finish late"):
        pool.run(late, deadline_s=0.1)
    assert pool.run(prompt) == ["a result of its own"]


def test_a_job_after_one_that_ended_its_rank_gets_a_new_one(pool: RankPool) -> None:
    with pytest.raises(RuntimeError, match="rank 0 of 1 died in dies"):
        pool.run(dies)
    assert pool.run(prompt) == ["a result of its own"]
