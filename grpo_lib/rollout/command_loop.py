"""One thread that owns an object: others send it commands, which it runs between two iterations of its own work."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from grpo_lib.errors import GrpoError

T = TypeVar("T")


class LoopFailed(GrpoError):
    """The owning thread died; the message names it and the cause, which is also `__cause__`."""


class CommandLoop:
    """Runs `iterate` while `has_work`, and commands in the order they were sent.

    A command that raises tells its sender and nobody else. When an iteration raises, or a command sent as `fatal`, the
    object's state is unknown: every waiting and every later sender gets `LoopFailed`. So each `call` ends once the
    loop has reached it or has died, and needs no deadline of its own; how long one iteration or command takes is
    bounded by whoever wrote it.
    """

    def __init__(
        self,
        name: str,
        *,
        iterate: Callable[[], None],
        has_work: Callable[[], bool],
        on_failure: Callable[[LoopFailed], None],
    ) -> None:
        self._name, self._iterate, self._has_work, self._on_failure = name, iterate, has_work, on_failure
        self._wake = threading.Condition()
        self._commands: deque[tuple[Callable[[], Any], Future[Any], bool]] = deque()
        self._failure: BaseException | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def call(self, command: Callable[[], T], *, fatal: bool = False) -> T:
        """Run a command in the loop's thread and return its result, or raise what it raised."""
        return self.post(command, fatal=fatal).result()

    def post(self, command: Callable[[], T], *, fatal: bool = False) -> Future[T]:
        """Send a command without waiting for it."""
        future: Future[T] = Future()
        with self._wake:
            self._raise_if_failed()
            if self._stopping:
                raise LoopFailed(f"{self._name} is closed")
            self._commands.append((command, future, fatal))
            self._wake.notify()
        return future

    def check(self) -> None:
        """Raise `LoopFailed` if the thread has died."""
        with self._wake:
            self._raise_if_failed()

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def stop(self, timeout_s: float) -> bool:
        """Let the commands sent so far finish, end the thread, and say whether it ended in time."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            cause = self._failure
            raise LoopFailed(f"{self._name} failed: {type(cause).__name__}: {cause}") from cause

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:  # noqa: BLE001 - this thread's boundary; senders get it as LoopFailed
            self._fail(error)

    def _turn(self) -> bool:
        """Wait for something to do, run all commands, then iterate once; False when stopped."""
        with self._wake:
            while not self._commands and not self._stopping and not self._has_work():
                self._wake.wait()
            batch, self._commands = self._commands, deque()
            stopping = self._stopping
        while batch:
            command, future, fatal = batch.popleft()
            try:
                future.set_result(command())
            except BaseException as error:
                future.set_exception(error)
                if fatal:
                    with self._wake:  # what was sent after it must not wait for ever
                        self._commands.extendleft(reversed(batch))
                    raise
        if stopping:
            return False
        if self._has_work():
            self._iterate()
        return True

    def _fail(self, error: BaseException) -> None:
        with self._wake:
            self._failure = error
            waiting, self._commands = self._commands, deque()
        failed = LoopFailed(f"{self._name} failed: {type(error).__name__}: {error}")
        failed.__cause__ = error
        for _, future, _ in waiting:
            future.set_exception(failed)
        self._on_failure(failed)
