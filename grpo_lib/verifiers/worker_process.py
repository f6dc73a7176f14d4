"""The parent's handle on one worker process."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection

from grpo_lib.config import VerifierConfig
from grpo_lib.types import Prompt, Verdict
from grpo_lib.verifiers.base import VerifierFactory

_START_S = 60.0  # deadline for a worker to import its verifiers
_ALARM_GRACE_S = 1.0  # a worker without a parent ends itself this long after an item's deadline


class WorkerDied(Exception):
    """The process ended, or closed its end; the text says how."""


def pickled_setup(factories: Mapping[str, VerifierFactory], config: VerifierConfig) -> bytes:
    """A worker's first message.

    Raises:
        ValueError: a factory cannot be imported by another process.
    """
    for name, factory in factories.items():
        if getattr(factory, "__module__", None) == "__main__" or "<" in getattr(factory, "__qualname__", "<"):
            raise ValueError(
                f"verifier {name!r}: its factory {factory!r} must be a module-level function of an importable module, "
                "since worker processes import it by name"
            )
    return pickle.dumps((dict(factories), config.correct_reward, config.timeout_s + _ALARM_GRACE_S))


class WorkerProcess:
    """A child process with a pipe each way.

    It leads a session of its own, so that killing it takes what a verifier may have started along, and Ctrl-C in a
    terminal does not reach it before the run has closed the pool.
    """

    def __init__(self) -> None:
        requests_read, requests_write = os.pipe()
        verdicts_read, verdicts_write = os.pipe()
        self._requests = Connection(requests_write, readable=False)
        self._verdicts = Connection(verdicts_read, writable=False)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "grpo_lib.verifiers.worker", str(requests_read), str(verdicts_write)],
                stdin=subprocess.DEVNULL,
                pass_fds=(requests_read, verdicts_write),
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
                    "OMP_NUM_THREADS": "1",  # a worker is one core's worth; more threads only steal from the trainer
                },
                start_new_session=True,
            )
        except BaseException:
            self._requests.close()
            self._verdicts.close()
            raise
        finally:
            os.close(requests_read)
            os.close(verdicts_write)
        self._readable = select.poll()  # kept, because `Connection.poll` builds a selector for every call
        self._readable.register(self._verdicts, select.POLLIN)
        self.pid = self._process.pid
        self._lock = threading.Lock()
        self._reaped = False

    def greet(self, setup: bytes) -> str | None:
        """Hand over the setup and wait until the verifiers are imported; a text says why they are not."""
        try:
            self._requests.send_bytes(setup)
            if not self._readable.poll(1000 * _START_S):
                return f"it was not ready within {_START_S:g} s"
            return self._verdicts.recv()
        except (EOFError, OSError):
            return f"it {_ending(self._exit_status())}; its error output says more"

    def send(self, batch: Sequence[tuple[str, Prompt, str]]) -> bool:
        """Give it (verifier, prompt, text) triples; False when it is dead already."""
        try:
            self._requests.send(batch)
        except OSError:
            return False
        return True

    def receive(self, timeout_s: float) -> Verdict | None:
        """Its next verdict; None when there is none in time.

        Raises:
            WorkerDied: it ended instead.
        """
        try:
            return self._verdicts.recv() if self._readable.poll(math.ceil(1000 * timeout_s)) else None
        except (EOFError, OSError) as error:
            status = self._exit_status()
            if status == -signal.SIGALRM:  # it noticed its deadline before this process did
                return None
            raise WorkerDied(_ending(status)) from error

    def kill(self) -> None:
        """Kill it and everything in its session's group; safe from any thread and at any time."""
        with self._lock:
            # An unreaped child keeps its process id, so this cannot hit a stranger.
            if not self._reaped:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> None:
        """Kill it, wait for its end and close the pipes; only the thread that reads from it may call this."""
        self._exit_status()
        self._requests.close()
        self._verdicts.close()

    def _exit_status(self) -> int:
        self.kill()
        with self._lock:
            self._reaped = True
            return self._process.wait()


def _ending(status: int) -> str:
    return f"died of signal {-status}" if status < 0 else f"exited with status {status}"
