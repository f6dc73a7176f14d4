"""The thread that owns an engine: commands between iterations, and no wait that outlives it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from grpo_lib.rollout.command_loop import CommandLoop, LoopFailed


class Worked:
    """A loop around a counter; `run` is switched by commands only."""

    def __init__(self, iterate: Callable[[], None] | None = None) -> None:
        self.run = False
        self.iterations = 0
        self.threads: set[int] = set()
        self.failure: LoopFailed | None = None
        self._iterate = iterate
        self.loop = CommandLoop(
            "engine 3", iterate=self.iterate, has_work=lambda: self.run, on_failure=self._note_failure
        )
        self.loop.start()

    def iterate(self) -> None:
        self.threads.add(threading.get_ident())
        self.iterations += 1
        if self._iterate is not None:
            self._iterate()

    def set_run(self, run: bool) -> int:
        self.threads.add(threading.get_ident())
        self.run = run
        return self.iterations

    def _note_failure(self, failure: LoopFailed) -> None:
        self.failure = failure


@pytest.fixture
def worked() -> Iterator[Worked]:
    worked = Worked()
    yield worked
    assert worked.loop.stop(5.0)


def test_commands_and_iterations_share_one_thread_and_never_overlap(worked: Worked) -> None:
    assert worked.loop.call(lambda: worked.set_run(True)) == 0
    for _ in range(20):
        at_start, at_end = worked.loop.call(lambda: (worked.iterations, worked.iterations))
        assert at_start == at_end
    stopped_at = worked.loop.call(lambda: worked.set_run(False))
    assert worked.loop.call(lambda: worked.iterations) == stopped_at, "no iteration after the command that stops them"
    assert stopped_at > 0
    assert len(worked.threads) == 1
    assert threading.get_ident() not in worked.threads


def test_a_commands_error_reaches_its_sender_only(worked: Worked) -> None:
    def fail() -> None:
        raise ValueError("bad request")

    with pytest.raises(ValueError, match="bad request"):
        worked.loop.call(fail)
    assert worked.loop.call(lambda: 7) == 7
    assert worked.failure is None


def test_a_failed_iteration_wakes_everybody_and_names_the_cause() -> None:
    release = threading.Event()

    def explode() -> None:
        release.wait(5.0)
        raise MemoryError("no block left")

    worked = Worked(explode)
    worked.loop.call(lambda: worked.set_run(True))
    waiting = worked.loop.post(lambda: 1)
    release.set()
    with pytest.raises(LoopFailed, match="engine 3 failed: MemoryError: no block left"):
        waiting.result(5.0)
    for attempt in (lambda: worked.loop.call(lambda: 1), worked.loop.check):
        with pytest.raises(LoopFailed, match="engine 3 failed: MemoryError") as caught:
            attempt()
        assert isinstance(caught.value.__cause__, MemoryError)
    assert worked.failure is not None
    assert worked.loop.stop(5.0)


def test_a_failed_fatal_command_ends_the_loop_but_not_its_own_error() -> None:
    worked = Worked()
    block = threading.Event()
    first = worked.loop.post(lambda: block.wait(5.0))

    def half_done() -> None:
        raise OSError("link lost")

    fatal, later = worked.loop.post(half_done, fatal=True), worked.loop.post(lambda: 1)
    block.set()
    assert first.result(5.0)
    with pytest.raises(OSError, match="link lost"):
        fatal.result(5.0)
    with pytest.raises(LoopFailed, match="engine 3 failed: OSError: link lost"):
        later.result(5.0)
    with pytest.raises(LoopFailed):
        worked.loop.call(lambda: 1)
    assert worked.loop.stop(5.0)


def test_commands_sent_before_stop_still_run() -> None:
    worked = Worked()
    block = threading.Event()
    worked.loop.post(lambda: block.wait(5.0))
    last = worked.loop.post(lambda: "done")
    stopper = threading.Thread(target=worked.loop.stop, args=(5.0,))
    stopper.start()
    block.set()
    stopper.join(5.0)
    assert last.result(0) == "done"
    with pytest.raises(LoopFailed, match="engine 3 is closed"):
        worked.loop.call(lambda: 1)
