"""Judges completions in killable processes, so that no text and no verifier can stop, slow or corrupt a run.

    submit ─► queue ─► one thread per worker process ─► done ─► collect
                         │ gives it a batch, then waits for one verdict after the other, each with its deadline
                         └ late or dead: that item is FAILED, the rest of the batch goes back, a new process starts

Threads and not signals keep the deadlines, so the pool works off the main thread too (verl 5635, trl 5281), and a
worker that hangs is gone after its deadline whether or not anybody collects (AReaL 1426).
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType

from grpo_lib.config import VerifierConfig
from grpo_lib.errors import ConfigError, VerifierOutage
from grpo_lib.types import Prompt, Verdict, VerdictReason
from grpo_lib.verifiers.base import VerifierFactory, failure
from grpo_lib.verifiers.registry import VERIFIERS
from grpo_lib.verifiers.worker_process import WorkerDied, WorkerProcess, pickled_setup

_BATCH = 32  # few enough that a hanging item holds up few others, enough that round trips cost little
_PATIENCE_S = 0.001  # verdicts that follow each other faster are handed over together: one wake-up for many


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    key: str
    prompt: Prompt
    text: str


class ProcessVerifierPool:
    """`interfaces.VerifierPool` on child processes.

    Args:
        config: Number of workers, deadline, text limit and reward.
        verifiers: Factories by name, importable module-level functions; the registered ones when absent.
    """

    def __init__(self, config: VerifierConfig, *, verifiers: Mapping[str, VerifierFactory] | None = None) -> None:
        self._config = config
        self._names = frozenset(VERIFIERS if verifiers is None else verifiers)
        factories = {name: spec.build for name, spec in VERIFIERS.items()} if verifiers is None else dict(verifiers)
        setup = pickled_setup(factories, config)
        self._changed = threading.Condition()  # guards everything below; notified on work, verdicts and closing
        self._queue: deque[_Item] = deque()
        self._pending: set[str] = set()  # submitted and not yet judged
        self._done: dict[str, Verdict] = {}
        self._outage: str | None = None
        self._closed = False
        self._workers: set[WorkerProcess] = set()
        self._threads = [
            threading.Thread(target=self._serve, args=(setup,), name=f"verifier-{index}", daemon=True)
            for index in range(config.num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, key: str, prompt: Prompt, text: str) -> None:
        """Queue one text; returns at once.

        Args:
            key: Name of the sample, unique among those not yet collected.
        """
        if prompt.verifier not in self._names:
            names = ", ".join(sorted(self._names))
            raise ConfigError([f"prompt {prompt.prompt_id} wants the verifier {prompt.verifier!r}; there are {names}"])
        item = _Item(key=key, prompt=prompt, text=text[: self._config.max_text_chars])
        with self._changed:
            if self._closed:
                raise ValueError(f"{key} was submitted to a closed verifier pool")
            if key in self._pending or key in self._done:
                raise ValueError(f"{key} was submitted twice without collecting its verdict")
            self._pending.add(key)
            self._queue.append(item)
            self._changed.notify_all()

    def collect(self, timeout_s: float) -> dict[str, Verdict]:
        """Verdicts finished since the last call; waits for the first unless nothing is left to wait for.

        Raises:
            VerifierOutage: workers cannot be started, so no verdict will ever come.
        """
        with self._changed:
            self._changed.wait_for(lambda: bool(self._done or self._outage) or not self._pending, timeout_s)
            if self._outage is not None:
                raise VerifierOutage(self._outage)
            done, self._done = self._done, {}
            return done

    def close(self) -> None:
        """Kill the workers, which hold nothing worth saving, and wait for their end; pending texts are dropped."""
        with self._changed:
            self._closed = True
            workers = tuple(self._workers)
            self._changed.notify_all()
        for worker in workers:
            worker.kill()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> ProcessVerifierPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers that there are now."""
        with self._changed:
            return tuple(sorted(worker.pid for worker in self._workers))

    def _serve(self, setup: bytes) -> None:
        """Body of one thread: keeps one worker alive and busy until the pool closes."""
        try:
            while (worker := self._start(setup)) is not None:
                try:
                    while (batch := self._take()) and self._judge(worker, batch):
                        pass
                finally:
                    self._retire(worker)
        except Exception as error:  # nobody else would notice that this thread is gone
            self._fail(f"the verifier pool failed: {error!r}")
            raise

    def _start(self, setup: bytes) -> WorkerProcess | None:
        """A ready worker; None when the pool closes or none can be started."""
        with self._changed:
            if self._closed or self._outage:
                return None
            try:
                worker = WorkerProcess()
            except OSError as error:
                self._fail(f"a verifier worker cannot be started: {error}")
                return None
            self._workers.add(worker)
        problem = worker.greet(setup)
        if problem is None:
            return worker
        self._retire(worker)
        with self._changed:
            if not self._closed:
                self._fail(f"a verifier worker cannot start: {problem}")
        return None

    def _retire(self, worker: WorkerProcess) -> None:
        worker.reap()
        with self._changed:
            self._workers.discard(worker)

    def _fail(self, problem: str) -> None:
        with self._changed:
            self._outage = problem
            self._changed.notify_all()

    def _take(self) -> list[_Item]:
        """The next batch, waiting for one; empty when the pool closes."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._queue) or self._closed)
            if self._closed:
                return []
            count = min(_BATCH, math.ceil(len(self._queue) / self._config.num_workers))
            return [self._queue.popleft() for _ in range(count)]

    def _judge(self, worker: WorkerProcess, batch: Sequence[_Item]) -> bool:
        """Have a batch judged; False when the worker is of no more use. What it did not reach goes back."""
        if not worker.send([(item.prompt.verifier, item.prompt, item.text) for item in batch]):
            self._publish({}, unjudged=batch)  # it died while idle: no item's fault
            return False
        verdicts: dict[str, Verdict] = {}
        for index, item in enumerate(batch):
            verdict, usable = self._next_verdict(worker, item, verdicts)
            verdicts[item.key] = verdict
            if not usable:
                self._publish(verdicts, unjudged=batch[index + 1 :])
                return False
        self._publish(verdicts)
        return True

    def _next_verdict(self, worker: WorkerProcess, item: _Item, at_hand: dict[str, Verdict]) -> tuple[Verdict, bool]:
        """The verdict of `item`, and whether the worker can go on. Publishes `at_hand` before a real wait."""
        name, limit_s = item.prompt.verifier, self._config.timeout_s
        try:
            verdict = worker.receive(_PATIENCE_S)
            if verdict is None:
                self._publish(at_hand)
                verdict = worker.receive(limit_s)
        except WorkerDied as died:
            return failure(VerdictReason.CRASH, f"verifier {name!r} took its process down: it {died}"), False
        if verdict is None:
            text = f"verifier {name!r} took longer than verifier.timeout_s ({limit_s:g} s)"
            return replace(failure(VerdictReason.TIMEOUT, text), elapsed_ms=1000 * limit_s), False
        return verdict, True

    def _publish(self, verdicts: dict[str, Verdict], *, unjudged: Sequence[_Item] = ()) -> None:
        """Hand verdicts to `collect`, emptying `verdicts`, and put items back to the head of the queue."""
        with self._changed:
            self._done.update(verdicts)
            self._pending.difference_update(verdicts)
            self._queue.extendleft(reversed(unjudged))
            self._changed.notify_all()
        verdicts.clear()
