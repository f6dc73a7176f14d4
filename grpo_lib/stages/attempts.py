"""Who works on a run now, and who did: one process at a time, whose life and place another process can see.

``<run>/running.json``    process, stage, step and span of the attempt under way; empty when there is none
``<run>/attempts.jsonl``  a line when an attempt begins, when it continues from a checkpoint, and when it ends

A killed process leaves its page. It is found dead by its process id where that can be looked up, else because its
heartbeat, the time of the page, does not move while somebody watches.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from grpo_lib.data.files import append_json_line, storage_errors
from grpo_lib.errors import DataError, RunBusy
from grpo_lib.stages.run_paths import RunPaths
from grpo_lib.tracking import read_metrics

HEARTBEAT_S = 5.0
SILENT_S = 20.0  # a process that cannot be looked up counts as dead when it does not beat for this long
log = logging.getLogger(__name__)

_SETTING = "storage.root"
_PAGE_BYTES = 4096  # written in one call and padded, so that a reader meets one state or the other
_READS = 5  # of a page that may be written at the same moment
_ERROR_CHARS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessName:
    """A process among all of all machines and times: ids are given again, this combination is not."""

    pid: int
    started: int  # clock ticks after boot
    boot_id: str
    namespace: str  # of process ids; another container on the same machine has another

    @staticmethod
    def own() -> ProcessName:
        return ProcessName(
            pid=os.getpid(),
            started=_started(os.getpid()) or 0,
            boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            namespace=os.readlink("/proc/self/ns/pid"),
        )

    def is_alive(self) -> bool | None:
        """None where it cannot be looked up from here."""
        here = ProcessName.own()
        if (self.boot_id, self.namespace) != (here.boot_id, here.namespace):
            return None
        return _started(self.pid) == self.started


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The attempt under way, as it last reported."""

    attempt: int
    process: ProcessName
    host: str
    stage: str  # e.g. "fit"
    step: int | None = None  # of the loop
    span: str | None = None  # of `timing.SPANS`
    parts: Mapping[str, int] | None = None  # process id by part, e.g. "engine 0", on the machines where they run
    beat: float = 0.0  # seconds since the epoch, when it last gave a sign of life

    def __str__(self) -> str:
        place = "".join((f" step {self.step}" if self.step else "", f" ({self.span})" if self.span else ""))
        silent_s = max(0.0, time.time() - self.beat)
        return (
            f"attempt {self.attempt}, process {self.process.pid} on {self.host}, in {self.stage}{place}, "
            f"last heard of {silent_s:.0f} s ago"
        )


class Attempt:
    """This process's hold on a run. What it reports only tells others where it stands. For one thread."""

    def __init__(self, page: int, holder: Holder, lines: Path) -> None:
        self._page, self._holder, self._lines = page, holder, lines

    @property
    def number(self) -> int:
        """Counts from 1 over the run's life."""
        return self._holder.attempt

    @property
    def step(self) -> int | None:
        """Of the loop; None before the first."""
        return self._holder.step

    def at_step(self, step: int) -> None:
        """The loop begins a step."""
        self._report(step=step, span=None)

    def in_span(self, span: str) -> None:
        """The step begins a part of its work."""
        self._report(span=span)

    def started(self, parts: Mapping[str, int]) -> None:
        """Name the processes that were started, by part."""
        self._report(parts=dict(parts))

    def note(self, event: str, **facts: Any) -> None:
        """Add a line to the run's list of attempts."""
        line = {"attempt": self.number, "event": event, "stage": self._holder.stage, "at": _now(), **facts}
        append_json_line(self._lines, line, setting=_SETTING)

    def beat(self) -> None:
        """Show that the process is alive: the page's time is the heartbeat, whatever stands on it."""
        os.utime(self._page)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Be in a stage, and note how it ends."""
        before = self._holder.stage
        self._report(stage=name, step=None, span=None)
        self.note("begin", pid=self._holder.process.pid, host=self._holder.host)
        try:
            yield
        except BaseException as error:
            self.note("failed", error=f"{type(error).__name__}: {error}"[:_ERROR_CHARS])
            raise
        self.note("done")
        self._report(stage=before, step=None, span=None)

    def _report(self, **changes: Any) -> None:
        self._holder = replace(self._holder, **changes)
        _write_page(self._page, self._holder)


@contextmanager
def attempt(paths: RunPaths, *, stage: str) -> Iterator[Attempt]:
    """Work on a run alone. An attempt inside one of the same process is a stage of it.

    Raises:
        RunBusy: another process is at work on the run.
        StorageError: the run's folder cannot be written.
    """
    with storage_errors(paths.running, setting=_SETTING):
        paths.run.mkdir(parents=True, exist_ok=True)
        page = os.open(paths.running, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        holder, is_outermost = _take(page, paths, stage)
        current = Attempt(page, holder, paths.attempts)
        if not is_outermost:
            with current.stage(stage):
                yield current
            return
        try:
            with _beating(current), current.stage(stage):
                yield current
        finally:
            os.ftruncate(page, 0)
    finally:
        os.close(page)


def holder_of(paths: RunPaths) -> Holder | None:
    """What the last attempt reported, if it has not ended; it may be dead. None when there is none.

    Raises:
        DataError: `running.json` is damaged.
    """
    try:
        page = os.open(paths.running, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        return _read_page(page, paths)
    finally:
        os.close(page)


def attempts_of(paths: RunPaths) -> list[dict[str, Any]]:
    """Lines of `attempts.jsonl`, oldest first.

    Raises:
        DataError: a line is not JSON.
    """
    return list(read_metrics(paths.attempts)) if paths.attempts.is_file() else []


def _take(page: int, paths: RunPaths, stage: str) -> tuple[Holder, bool]:
    """The holder that this process is from now on, and whether it has just become it."""
    fcntl.flock(page, fcntl.LOCK_EX)  # two that find a dead holder must not both take its place
    try:
        found, own = _read_page(page, paths), ProcessName.own()
        if found is not None and found.process == own:
            return found, False
        if found is not None and _is_alive(found, paths):
            raise RunBusy(
                f"{paths.run} is being worked on: {found}. Wait for it, or stop that process; a run is continued by "
                "one process at a time"
            )
        number = 1 + max((line["attempt"] for line in attempts_of(paths)), default=0)
        holder = Holder(attempt=number, process=own, host=socket.gethostname(), stage=stage)
        _write_page(page, holder)
        return holder, True
    finally:
        fcntl.flock(page, fcntl.LOCK_UN)


def _is_alive(found: Holder, paths: RunPaths) -> bool:
    """Whether a process is at work; waits for its heartbeat where it cannot be looked up. Clocks are not compared."""
    alive = found.process.is_alive()
    if alive is not None:
        return alive
    log.info("%s may still be at work: waiting %g s for a heartbeat of %s", paths.run, SILENT_S, found)
    deadline = time.monotonic() + SILENT_S
    while time.monotonic() < deadline:
        time.sleep(1.0)
        now = holder_of(paths)  # opened anew each time: a network file system then looks at the server's time
        if now is None or now.process != found.process:
            return False
        if now.beat != found.beat:
            return True
    return False


@contextmanager
def _beating(current: Attempt) -> Iterator[None]:
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(HEARTBEAT_S):
            current.beat()

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _write_page(page: int, holder: Holder) -> None:
    content = json.dumps(asdict(holder)).encode().ljust(_PAGE_BYTES)
    os.pwrite(page, content, 0)
    os.ftruncate(page, len(content))  # what was there may have been longer


def _read_page(page: int, paths: RunPaths) -> Holder | None:
    for _ in range(_READS):
        text = os.pread(page, 1 << 20, 0).strip()
        if not text:
            return None
        try:
            values = json.loads(text)
            beat = os.fstat(page).st_mtime
            return Holder(**{**values, "process": ProcessName(**values["process"]), "beat": beat})
        except (ValueError, TypeError, KeyError):
            time.sleep(0.01)
    raise DataError(f"{paths.running} is damaged; remove it when no process works on the run")


def _started(pid: int) -> int | None:
    """When a process started, in clock ticks after boot; None when there is none, or only its entry is left."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state == "Z" else int(fields[18])


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
