"""Where the seconds of a step go: one class, the same boundaries for every backend.

A step starts at the very moment the one before it ended, so the steps of a run add up to its wall time; inside a step
the spans and `other_s` add up to `step_s` by construction, and `other_s` is what nobody claimed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SPANS: tuple[str, ...] = (
    "wait_for_rollouts",  # submit to last completion of the step
    "verify",  # what verification adds after the last completion
    "pack",  # advantages, samples, packing, planning
    "forward_backward",  # policy passes over all ranks, reference and proximal log-probabilities included
    "optim",  # clip and optimiser step
    "weight_sync",  # transfer and its checksums, and engines put to sleep and woken; the decode canary is `canary`
    "canary",  # decode canary, when due
    "checkpoint",  # waiting for rollouts to be stored, and checkpoints
    "record",  # metrics, log line, trackers and live card of the step before
)


class StepTimer:
    """Charges the seconds of each step to named spans.

    Spans do not nest, so nothing is counted twice. The caller's work must be complete when a span closes: trainer and
    engine methods return only after their device has finished.

    Args:
        clock: Monotonic seconds.
        on_span: Told the name of every span before its work begins.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, *, on_span: Callable[[str], None] | None = None
    ) -> None:
        self._clock, self._on_span = clock, on_span
        self._step_started = clock()
        self._open: str | None = None
        self._seconds = dict.fromkeys(SPANS, 0.0)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Charge the enclosed time to `name`; entering a span twice in a step adds up."""
        if name not in self._seconds:
            raise ValueError(f"unknown time span {name!r}; the spans are {', '.join(SPANS)}")
        if self._open is not None:
            raise ValueError(f"time span {name!r} opened inside {self._open!r}; spans do not nest")
        self._open = name
        started = self._clock()
        try:
            if self._on_span is not None:
                self._on_span(name)
            yield
        finally:
            self._seconds[name] += self._clock() - started
            self._open = None

    def move(self, seconds: float, *, source: str, target: str) -> None:
        """Charge part of one span to another, for a callee that timed a part of its own work apart."""
        if seconds > self._seconds[source] + 1e-9:
            raise ValueError(f"cannot move {seconds:.6f} s out of {source!r}, which has {self._seconds[source]:.6f} s")
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def finish_step(self) -> dict[str, float]:
        """Close the step: seconds by `<span>_s`, with `other_s` and `step_s`; the next step starts here."""
        if self._open is not None:
            raise ValueError(f"step finished inside the time span {self._open!r}")
        now = self._clock()
        step = now - self._step_started
        times = {f"{name}_s": seconds for name, seconds in self._seconds.items()}
        times["other_s"] = step - sum(self._seconds.values())
        times["step_s"] = step
        self._step_started = now
        self._seconds = dict.fromkeys(SPANS, 0.0)
        return times
