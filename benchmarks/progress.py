"""Where a benchmark is, on standard error: what stopped it too early can be read there."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

_BEGAN = time.monotonic()
_PERIOD_S = 1.0


def say(text: str) -> None:
    """One line with the seconds since the start."""
    print(f"[{time.monotonic() - _BEGAN:6.1f} s] {text}", file=sys.stderr, flush=True)


@contextmanager
def actors_watched() -> Iterator[None]:
    """Say which calls Ray's actors are in, whenever that has changed: Ray writes the call into the process' title."""
    over = threading.Event()

    def watch() -> None:
        before: list[str] = []
        while not over.wait(_PERIOD_S):
            now = actor_calls()
            if now != before:
                say(", ".join(now) or "no call")
            before = now

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def actor_calls() -> list[str]:
    """E.g. `ray::Host.build`, of all descendants of this process."""
    titles: list[str] = []
    for process in psutil.Process().children(recursive=True):
        try:
            titles += [part for part in process.cmdline()[:1] if part.startswith("ray::") and "." in part]
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return sorted(titles)
