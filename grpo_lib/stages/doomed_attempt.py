"""An attempt at a run in a process of its own, which is killed at a chosen place: how resuming is proved and tested.

The process is the real command. Where it stands is read from outside, from the page that every attempt keeps.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from grpo_lib.errors import DeadlineExceeded
from grpo_lib.stages.attempts import Holder, holder_of
from grpo_lib.stages.run_paths import RunPaths

_FAR_S, _NEAR_S = 0.02, 0.0002  # between two looks: before the first step, and from then on
_TAIL_CHARS = 3000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an attempt ended."""

    code: int  # of the process; negative for a signal
    last: Holder | None  # its last report; None where it could still say that it ended
    output: str  # the end of it


class DoomedAttempt:
    """`grpo run resume RUN --until fit`, under watch.

    Args:
        overrides: ``key.path=value`` for ``--set``.
        log: Where its output goes.
    """

    def __init__(self, paths: RunPaths, *, log: Path, overrides: Sequence[str] = ()) -> None:
        self._paths, self._log = paths, log
        command = [sys.executable, "-m", "grpo_lib.cli", "run", "resume", str(paths.run), "--until", "fit"]
        for override in overrides:
            command += ["--set", override]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        self._family: dict[int, psutil.Process] = {}
        self.seen: Holder | None = None  # the report on which it was killed

    def kill_when(self, is_there: Callable[[Holder], bool], *, part: str | None = None, delay_s: float = 0.0) -> bool:
        """Kill the driver, or the part of that name, when its report says so; False when it ended before.

        Args:
            is_there: Asked with every report, as fast as they can be read.
            delay_s: Between the report and the signal.
        """
        while self._process.poll() is None:
            report = self._report()
            if report is None or not is_there(report):
                time.sleep(_FAR_S if report is None or report.step is None else _NEAR_S)
                continue
            if delay_s:
                time.sleep(delay_s)
            return self._kill(report, part)
        return False

    def wait(self, *, deadline_s: float) -> Ending:
        """The end of the process.

        Raises:
            DeadlineExceeded: it did not end; it is killed then.
        """
        try:
            code = self._process.wait(timeout=deadline_s)
        except subprocess.TimeoutExpired as error:
            self._process.kill()
            self._process.wait()
            raise DeadlineExceeded(
                stage=f"attempt at {self._paths.run}",
                waited_for=f"the end of process {self._process.pid} (see {self._log})",
                deadline_s=deadline_s,
                setting="deadlines.*",
            ) from error
        output = self._log.read_text(errors="replace")[-_TAIL_CHARS:]
        return Ending(code=code, last=holder_of(self._paths), output=output)

    def leftovers(self, *, deadline_s: float) -> list[str]:
        """Processes that the attempt had started and that are still there when the deadline has passed."""
        _, alive = psutil.wait_procs(list(self._family.values()), timeout=deadline_s)
        return [f"{process.pid} {_command(process)}" for process in alive]

    def _report(self) -> Holder | None:
        report = holder_of(self._paths)
        return report if report is not None and report.process.pid == self._process.pid else None

    def _kill(self, report: Holder, part: str | None) -> bool:
        pid = self._process.pid if part is None else (report.parts or {})[part]
        try:
            family = psutil.Process(self._process.pid).children(recursive=True)
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, psutil.NoSuchProcess):
            return False
        self._family |= {process.pid: process for process in family}
        self.seen = report
        return True


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:100]
    except psutil.Error:
        return "ended"
