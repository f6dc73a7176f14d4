"""Ranks find each other, wait with a deadline, and name who is missing."""

from __future__ import annotations

import pickle
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from grpo_lib.distributed.process_group import Rendezvous, free_port, host_store, init_ranks
from grpo_lib.errors import DeadlineExceeded, GrpoError, RankFailure
from tests.distributed.gloo_ranks import RankPool

LOCAL = "127.0.0.1"


def meet(num_ranks: int) -> list[Rendezvous]:
    """All ranks of a rendezvous in this process."""
    port = free_port()
    return [
        Rendezvous(rank=rank, world_size=num_ranks, address=LOCAL, port=port, timeout_s=10) for rank in range(num_ranks)
    ]


def test_a_barrier_lets_nobody_through_before_the_last_arrives() -> None:
    ranks = meet(3)
    with ThreadPoolExecutor(3) as threads:
        early = [threads.submit(rank.barrier, "shards", deadline_s=20) for rank in ranks[:2]]
        time.sleep(0.2)
        assert not any(future.done() for future in early)
        ranks[2].barrier("shards", deadline_s=20)
        for future in early:
            future.result(timeout=20)


def test_a_barrier_can_be_used_again() -> None:
    """The second use must wait for second arrivals, not find the keys of the first."""
    ranks = meet(2)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(ranks[0].barrier, "step", deadline_s=20)
        ranks[1].barrier("step", deadline_s=20)
        first.result(timeout=20)
    with pytest.raises(DeadlineExceeded, match=r"ranks \[1\] of 2"):
        ranks[0].barrier("step", deadline_s=0.2)


def test_an_expired_barrier_names_the_missing_ranks_and_the_setting() -> None:
    ranks = meet(4)
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(ranks[2].barrier, "before the first sync", deadline_s=0.3, setting="deadlines.barrier_s")
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded) as caught:
            ranks[0].barrier("before the first sync", deadline_s=0.3)
        assert time.monotonic() - started < 5
        with pytest.raises(DeadlineExceeded):
            other.result(timeout=20)
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.waited_for, error.setting, error.deadline_s) == ("ranks [1, 3] of 4", "deadlines.barrier_s", 0.3)
    assert "before the first sync" in str(error)


def test_a_port_in_use_is_named_with_its_setting() -> None:
    with socket.socket() as taken:
        taken.bind((LOCAL, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(GrpoError, match=rf"port {port} on {LOCAL} is in use.*set my\.port to a free port"):
            Rendezvous(rank=0, world_size=2, address=LOCAL, port=port, timeout_s=5, port_setting="my.port")


def test_a_rank_that_cannot_reach_rank_0_says_so_in_time() -> None:
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"ranks \[0\] of 2 did not arrive within 0.5 s.*ranks_start_s"):
        Rendezvous(rank=1, world_size=2, address=LOCAL, port=free_port(), timeout_s=0.5)
    assert time.monotonic() - started < 10


def test_a_start_without_all_ranks_names_them() -> None:
    with pytest.raises(DeadlineExceeded, match=r"ranks \[1, 2\] of 3"):
        init_ranks(rank=0, world_size=3, address=LOCAL, port=free_port(), timeout_s=0.5)


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rank 2 is not in 0 … 1"):
        Rendezvous(rank=2, world_size=2, address=LOCAL, port=free_port(), timeout_s=1)


def group_facts(rank: int, num_ranks: int) -> tuple[int, float, str]:
    import torch
    import torch.distributed as dist

    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    timeout = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).options._timeout
    try:
        init_ranks(rank=rank, world_size=num_ranks, address=LOCAL, port=free_port(), timeout_s=1)
    except GrpoError as error:
        message = str(error)
    else:
        message = "joined twice"
    return int(total), timeout.total_seconds(), message


def test_the_group_works_and_its_collectives_have_our_deadline(two_ranks: RankPool) -> None:
    for total, timeout_s, message in two_ranks.run(group_facts):
        assert total == 3
        assert timeout_s == 120, "PyTorch's default of 1800 s would hold every device that long"
        assert "already belongs to a process group" in message


def test_a_lost_rank_0_is_a_rank_failure() -> None:
    host, other = meet(2)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(other.barrier, "sync", deadline_s=20)
        time.sleep(0.2)
        del host.store  # what is left of a rank whose process has died
        with pytest.raises(RankFailure, match="rank 0, which hosts the store, is gone"):
            waiting.result(timeout=30)


def test_a_stranger_on_the_port_does_not_hold_a_rank_for_ever() -> None:
    """It accepts the connection and never answers, which the store's own timeout does not cover."""
    with socket.socket() as stranger:
        stranger.bind((LOCAL, 0))
        stranger.listen()
        with pytest.raises(DeadlineExceeded, match=r"ranks \[0\] of 2") as caught:
            Rendezvous(rank=1, world_size=2, address=LOCAL, port=stranger.getsockname()[1], timeout_s=0.5)
    assert "is not our store" in str(caught.value.__cause__)


def test_a_hosted_store_keeps_its_port_until_the_others_come() -> None:
    """A port that was only found free may be somebody else's by the time that it is bound."""
    store = host_store(LOCAL, 2, timeout_s=10)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((LOCAL, store.port))
    first = Rendezvous(rank=0, world_size=2, address=LOCAL, port=store.port, timeout_s=10, store=store)
    second = Rendezvous(rank=1, world_size=2, address=LOCAL, port=store.port, timeout_s=10)
    with ThreadPoolExecutor(2) as threads:
        for meeting in [threads.submit(rank.barrier, "start", deadline_s=10) for rank in (first, second)]:
            meeting.result()
