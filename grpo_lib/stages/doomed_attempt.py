"""An attempt at a run in a process of its own, which dies at a chosen place: how resuming is proved and tested.

Either somebody kills the real command from outside, who reads where it stands from the page that every attempt keeps;
or the process carries its death, so that it comes inside a phase of a millisecond: `python -m` of this file.
"""

from __future__ import annotations

import argparse
import logging
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
_WAIT_S = 0.2  # between two looks at a process that is only waited for
_TAIL_CHARS = 3000


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """Where a process dies of itself."""

    step: int
    span: str  # of `timing.SPANS`
    visit: int = 1  # of the span in that step
    delay_s: float = 0.0  # from the beginning of the span


class Doom:
    """Listens to spans, and at its place has the kernel's timer send a signal that nothing handles.

    The process ends in the middle of whatever it does then, as by SIGKILL: no code of it runs any more.
    """

    def __init__(self, death: Death) -> None:
        self._death, self._visits = death, 0

    def __call__(self, step: int, span: str) -> None:
        if (step, span) == (self._death.step, self._death.span):
            self._visits += 1
            if self._visits == self._death.visit:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.setitimer(signal.ITIMER_REAL, max(self._death.delay_s, 1e-6))


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
        death: Carried by the process itself.
    """

    def __init__(
        self, paths: RunPaths, *, log: Path, overrides: Sequence[str] = (), death: Death | None = None
    ) -> None:
        self._paths, self._log = paths, log
        if death is None:
            command = ["grpo_lib.cli", "run", "resume", str(paths.run), "--until", "fit"]
            command += [part for override in overrides for part in ("--set", override)]
        else:
            place = [str(value) for value in (death.step, death.span, death.visit, death.delay_s)]
            command = [__name__, str(paths.run), *place]
        command = [sys.executable, "-m", *command]
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

    def _remember_family(self) -> None:
        """Note the processes that it has started by now, for `leftovers`."""
        try:
            family = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return
        self._family |= {process.pid: process for process in family}

    def wait(self, *, deadline_s: float) -> Ending:
        """The end of the process.

        Raises:
            DeadlineExceeded: it did not end; it is killed then.
        """
        deadline = time.monotonic() + deadline_s
        while (code := self._process.poll()) is None:
            if time.monotonic() > deadline:
                self._process.kill()
                self._process.wait()
                raise DeadlineExceeded(
                    stage=f"attempt at {self._paths.run}",
                    waited_for=f"the end of process {self._process.pid} (see {self._log})",
                    deadline_s=deadline_s,
                    setting="deadlines.*",
                )
            self._remember_family()
            time.sleep(_WAIT_S)
        output = self._log.read_text(errors="replace")[-_TAIL_CHARS:]
        return Ending(code=code, last=holder_of(self._paths), output=output)

    def leftovers(self, *, deadline_s: float) -> list[str]:
        """Processes that the attempt had started and that are still there when the deadline has passed."""
        deadline = time.monotonic() + deadline_s
        while (alive := [process for process in self._family.values() if _is_alive(process)]) and (
            time.monotonic() < deadline
        ):
            time.sleep(_WAIT_S)
        return [f"{process.pid} {_command(process)}" for process in alive]

    def _report(self) -> Holder | None:
        report = holder_of(self._paths)
        return report if report is not None and report.process.pid == self._process.pid else None

    def _kill(self, report: Holder, part: str | None) -> bool:
        pid = self._process.pid if part is None else (report.parts or {})[part]
        self._remember_family()
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        self.seen = report
        return True


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:100]
    except psutil.Error:
        return "ended"


def main(arguments: Sequence[str] | None = None) -> None:
    """Continue a run and die."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=str)
    parser.add_argument("step", type=int)
    parser.add_argument("span", type=str)
    parser.add_argument("visit", type=int)
    parser.add_argument("delay_s", type=float)
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("grpo_lib").setLevel(logging.INFO)
    from grpo_lib.stages import resume_run  # its imports take seconds, and the classes above do without them
    from grpo_lib.stages.stored_run import open_run

    death = Death(step=options.step, span=options.span, visit=options.visit, delay_s=options.delay_s)
    resume_run.run(open_run(options.run), until=resume_run.Stage.FIT, on_span=Doom(death))


if __name__ == "__main__":
    main()
