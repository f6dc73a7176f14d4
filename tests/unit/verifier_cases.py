"""Helpers for tests of the verifier pool."""

from __future__ import annotations

import time
from pathlib import Path

from grpo_lib.interfaces import VerifierPool
from grpo_lib.types import Prompt, Verdict

TIMEOUT_S = 0.4


def prompt(verifier: str, answer: str = "42") -> Prompt:
    return Prompt(prompt_id="p", text="t", token_ids=(1, 2), answer=answer, dataset="d", verifier=verifier)


def judge(pool: VerifierPool, cases: dict[str, tuple[str, str]], *, limit_s: float = 60) -> dict[str, Verdict]:
    """Verdicts of (verifier, text) by key."""
    for key, (verifier, text) in cases.items():
        pool.submit(key, prompt(verifier), text)
    verdicts: dict[str, Verdict] = {}
    deadline = time.monotonic() + limit_s
    while len(verdicts) < len(cases):
        assert time.monotonic() < deadline, f"no verdict for {sorted(set(cases) - set(verdicts))}"
        verdicts.update(pool.collect(1.0))
    return verdicts


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int, limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_alive(pid)
