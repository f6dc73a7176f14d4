"""The process that runs verifiers: ``python -m grpo_lib.verifiers.worker READ_FD WRITE_FD``.

It is a program of its own and not a `multiprocessing` child, because spawn and forkserver import the parent's main
module again: the flow, and torch with it. It holds nothing worth saving and may be killed at any moment.

Messages in: the setup (factories by name, reward, self-destruct seconds), then batches of (verifier, prompt, text).
Messages out: None when ready, or a text that says why not; then one verdict per item, in order.
"""

from __future__ import annotations

import math
import numbers
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection

from grpo_lib.interfaces import Verifier
from grpo_lib.types import Prompt, Verdict, VerdictReason, VerdictState
from grpo_lib.verifiers.base import failure, shown

# Enough for a symbolic algebra package; what wants more is a runaway and gets a MemoryError, not the machine's memory.
MEMORY_LIMIT_BYTES = 4 << 30


def main(read_descriptor: int, write_descriptor: int) -> int:
    """Serve until the parent closes its end, which it also does by dying."""
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a verifier that prints must not print into the run's output
    _limit_memory()
    requests = Connection(read_descriptor, writable=False)
    verdicts = Connection(write_descriptor, readable=False)
    try:
        factories, correct_reward, alarm_s = requests.recv()
        verifiers: Mapping[str, Verifier] = {name: build(correct_reward) for name, build in factories.items()}
    except Exception as error:  # noqa: BLE001 process boundary: the parent raises
        verdicts.send(f"{type(error).__name__}: {error}")
        return 1
    verdicts.send(None)
    try:
        while True:
            for name, prompt, text in requests.recv():
                # Kills this process even inside C code that never returns, in case the parent is no longer there to.
                signal.setitimer(signal.ITIMER_REAL, alarm_s)
                verdict = judge(name, verifiers[name], prompt, text)
                signal.setitimer(signal.ITIMER_REAL, 0)
                verdicts.send(verdict)
    except (EOFError, BrokenPipeError):
        return 0


def _limit_memory() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_LIMIT_BYTES if hard == resource.RLIM_INFINITY else min(hard, MEMORY_LIMIT_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def judge(name: str, verifier: Verifier, prompt: Prompt, text: str) -> Verdict:
    """The verifier's verdict, or a FAILED one that says what the verifier did instead of giving one."""
    started = time.perf_counter()
    try:
        verdict = checked(name, verifier(prompt, text))
    except Exception as error:  # noqa: BLE001 process boundary: the parent counts it
        verdict = failure(VerdictReason.CRASH, f"verifier {name!r} raised {type(error).__name__}: {shown(str(error))}")
    return replace(verdict, elapsed_ms=1000 * (time.perf_counter() - started))


def checked(name: str, verdict: object) -> Verdict:
    """A verdict of plain values, or a FAILED one that tells None, NaN and other values apart (TRL 1.16 does not)."""
    if not isinstance(verdict, Verdict):
        what = "None" if verdict is None else f"a {type(verdict).__name__}"
        return failure(VerdictReason.CRASH, f"verifier {name!r} returned {what} instead of a Verdict")
    reward: object = verdict.reward
    if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
        return failure(VerdictReason.CRASH, f"verifier {name!r} gave the reward {shown(str(reward))}")
    return Verdict(
        state=VerdictState(verdict.state),
        reward=float(reward),
        reason=VerdictReason(verdict.reason),
        extracted=None if verdict.extracted is None else shown(str(verdict.extracted)),
    )


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
