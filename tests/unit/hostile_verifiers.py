"""Verifiers that do what verifiers must not; worker processes import them by name."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from grpo_lib.interfaces import Verifier
from grpo_lib.types import Prompt, Verdict
from grpo_lib.verifiers import exact


def good(correct_reward: float) -> Verifier:
    return exact.build(correct_reward)


def hangs(correct_reward: float) -> Verifier:
    """Sleeps inside C code that holds the interpreter's lock, as a runaway regular expression or big integer does."""

    def verify(prompt: Prompt, text: str) -> Verdict:
        ctypes.PyDLL(None).sleep(1000)
        raise AssertionError("slept through its deadline")

    return verify


def exits(correct_reward: float) -> Verifier:
    def verify(prompt: Prompt, text: str) -> Verdict:
        os._exit(int(text))

    return verify


def alarms(correct_reward: float) -> Verifier:
    """Dies as a worker does whose own deadline came before its parent looked."""

    def verify(prompt: Prompt, text: str) -> Verdict:
        os.kill(os.getpid(), signal.SIGALRM)
        raise AssertionError("survived its alarm")

    return verify


def segfaults(correct_reward: float) -> Verifier:
    def verify(prompt: Prompt, text: str) -> Verdict:
        ctypes.string_at(0)
        raise AssertionError("read address 0")

    return verify


def raises(correct_reward: float) -> Verifier:
    def verify(prompt: Prompt, text: str) -> Verdict:
        raise ZeroDivisionError(f"no such luck with {text}")

    return verify


def gives_none(correct_reward: float) -> Verifier:
    def verify(prompt: Prompt, text: str) -> Verdict:
        return cast(Any, None)

    return verify


def gives_reward(correct_reward: float) -> Verifier:
    """The reward that the text names."""
    rewards: dict[str, Any] = {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "1.0"}

    def verify(prompt: Prompt, text: str) -> Verdict:
        return replace(exact.build(correct_reward)(prompt, text), reward=rewards[text])

    return verify


def hoards(correct_reward: float) -> Verifier:
    def verify(prompt: Prompt, text: str) -> Verdict:
        return cast(Any, bytearray(64 << 30))

    return verify


def prints(correct_reward: float) -> Verifier:
    def verify(prompt: Prompt, text: str) -> Verdict:
        sys.stdout.write("noise\n")
        sys.stdout.flush()
        return exact.build(correct_reward)(prompt, text)

    return verify


def counts_characters(correct_reward: float) -> Verifier:
    def verify(prompt: Prompt, text: str) -> Verdict:
        return replace(exact.build(correct_reward)(prompt, text), extracted=str(len(text)))

    return verify


def leaves_child(correct_reward: float) -> Verifier:
    """Starts a process, writes its id to the file that the text names, and hangs."""

    def verify(prompt: Prompt, text: str) -> Verdict:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        Path(text).write_text(str(child.pid))
        time.sleep(1000)
        raise AssertionError("slept through its deadline")

    return verify


def cannot_start(correct_reward: float) -> Verifier:
    raise RuntimeError("model file of the verifier is missing")


HOSTILE = {
    factory.__name__: factory
    for factory in (
        good, hangs, exits, alarms, segfaults, raises, gives_none, gives_reward, hoards, prints, counts_characters,
        leaves_child,
    )
}  # fmt: skip
