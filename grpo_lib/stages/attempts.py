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
from grpo_lib.errors import DataError, RunBusy, StorageError
from grpo_lib.stages.run_paths import RunPaths

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
    """This process's hold on a run. What it reports only tells others where it stands. For one thread.

    Raises:
        RunBusy: in what reports, when the run is no longer held by this process: it was taken for dead.
    """

    def __init__(self, page: int, holder: Holder, paths: RunPaths) -> None:
        self._page, self._holder, self._paths = page, holder, paths

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
        _end_last_line(self._paths.attempts)
        append_json_line(self._paths.attempts, line, setting=_SETTING)

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
            try:
                self.note("failed", error=f"{type(error).__name__}: {error}"[:_ERROR_CHARS])
            except StorageError as second:
                log.error("that attempt %d failed is not on record: %s", self.number, second)
            raise
        self.note("done")
        self._report(stage=before, step=None, span=None)

    def leave(self) -> None:
        """Empty the page, unless it is another's. What fails is logged: the work's own error may be on the way up."""
        try:
            found = holder_of(self._paths)
            if found is not None and found.process == self._holder.process:
                os.ftruncate(self._page, 0)
        except (OSError, DataError) as error:
            log.error("%s still names this process: %s", self._paths.running, error)

    def _report(self, **changes: Any) -> None:
        found = holder_of(self._paths)
        if found is None or found.process != self._holder.process:
            now = "nobody" if found is None else str(found)
            raise RunBusy(
                f"{self._paths.run} is not held by this process any more, which was {self._holder}; the holder now is "
                f"{now}. It was silent for more than {SILENT_S:g} s, or its page was removed; nothing more is written"
            )
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
        current = Attempt(page, holder, paths)
        if not is_outermost:
            with current.stage(stage):
                yield current
            return
        try:
            with _beating(current), current.stage(stage):
                yield current
        finally:
            current.leave()
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
    """Lines of `attempts.jsonl`, oldest first, without those that a full disk or a loss of power cut off."""
    if not paths.attempts.is_file():
        return []
    lines = (_parsed(line) for line in paths.attempts.read_bytes().splitlines())
    return [line for line in lines if line is not None]


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        values = json.loads(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) and "attempt" in values else None


def _end_last_line(file: Path) -> None:
    """Start a new line where the last one was cut off: the next would join it."""
    with storage_errors(file, setting=_SETTING):
        if not file.is_file() or file.stat().st_size == 0:
            return
        with file.open("rb+") as lines:
            lines.seek(-1, os.SEEK_END)
            if lines.read() != b"\n":
                lines.write(b"\n")


def _take(page: int, paths: RunPaths, stage: str) -> tuple[Holder, bool]:
    """The holder that this process is from now on, and whether it has just become it."""
    fcntl.flock(page, fcntl.LOCK_EX)  # two that find a dead holder must not both take its place
    try:
        found, own = _read_page(page, paths), ProcessName.own()
        if found is not None and found.process == own:
            return found, False
        if found is not None and (worker := _at_work(found, paths)) is not None:
            raise RunBusy(
                f"{paths.run} is being worked on: {worker}. Wait for it, or stop that process; a run is continued by "
                "one process at a time"
            )
        before = [line["attempt"] for line in attempts_of(paths)]
        number = 1 + max([0 if found is None else found.attempt, *before])  # its own lines may have been cut off
        holder = Holder(attempt=number, process=own, host=socket.gethostname(), stage=stage)
        _write_page(page, holder)
        return holder, True
    finally:
        fcntl.flock(page, fcntl.LOCK_UN)


def _at_work(found: Holder, paths: RunPaths) -> Holder | None:
    """Who is at work, if anybody is; waits for a heartbeat where the process cannot be looked up.

    Clocks are not compared. A process that takes the run meanwhile is judged in its turn.
    """
    alive = found.process.is_alive()
    if alive is not None:
        return found if alive else None
    log.info("%s may still be at work: waiting %g s for a heartbeat of %s", paths.run, SILENT_S, found)
    deadline = time.monotonic() + SILENT_S
    while time.monotonic() < deadline:
        time.sleep(1.0)
        now = holder_of(paths)  # opened anew each time: a network file system then looks at the server's time
        if now is None:
            return None
        if now.process != found.process:
            return _at_work(now, paths)
        if now.beat != found.beat:
            return now
    return None


@contextmanager
def _beating(current: Attempt) -> Iterator[None]:
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(HEARTBEAT_S):
            try:
                current.beat()
            except OSError as error:  # of a network file system, for a moment; without a beat the run counts as free
                log.warning("no heartbeat on attempt %d's page this time: %s", current.number, error)

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
