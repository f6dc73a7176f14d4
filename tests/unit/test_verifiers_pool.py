"""Verifiers that hang, die and lie cost their own verdict and nothing else. Every worker here is a real process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from grpo_lib.config import VerifierConfig
from grpo_lib.errors import ConfigError
from grpo_lib.types import Verdict, VerdictReason, VerdictState
from grpo_lib.verifiers.pool import ProcessVerifierPool
from tests.unit.hostile_verifiers import HOSTILE
from tests.unit.verifier_cases import TIMEOUT_S, is_alive, judge, prompt, wait_until_gone


@pytest.fixture(scope="module")
def hostile() -> Iterator[ProcessVerifierPool]:
    config = VerifierConfig(timeout_s=TIMEOUT_S, correct_reward=5.0, max_text_chars=100)
    with ProcessVerifierPool(config, verifiers=HOSTILE) as pool:
        yield pool


def test_hostile_items_fail_alone(hostile: ProcessVerifierPool) -> None:
    bad = {
        "hangs": ("hangs", ""), "alarms": ("alarms", ""), "exits": ("exits", "3"), "segfaults": ("segfaults", ""),
        "raises": ("raises", "x"),
        "none": ("gives_none", ""), "nan reward": ("gives_reward", "nan"), "inf reward": ("gives_reward", "inf"),
        "none reward": ("gives_reward", "none"), "text reward": ("gives_reward", "text"), "hoards": ("hoards", ""),
    }  # fmt: skip
    cases: dict[str, tuple[str, str]] = {}
    for number, (key, case) in enumerate(bad.items()):
        cases |= {f"good {number}": ("good", "42"), key: case, f"wrong {number}": ("good", "41")}
    verdicts = judge(hostile, cases)
    for number in range(len(bad)):
        assert verdicts[f"good {number}"].reward == 5.0
        assert verdicts[f"wrong {number}"].reason is VerdictReason.WRONG
    texts = {key: verdicts[key].extracted for key in bad}
    assert {verdicts[key].state for key in bad} == {VerdictState.FAILED}
    assert {verdicts[key].reward for key in bad} == {0.0}
    assert {key for key in bad if verdicts[key].reason is VerdictReason.TIMEOUT} == {"hangs", "alarms"}
    assert {verdicts[key].reason for key in bad if key not in ("hangs", "alarms")} == {VerdictReason.CRASH}
    assert texts == {
        "hangs": "verifier 'hangs' took longer than verifier.timeout_s (0.4 s)",
        "alarms": "verifier 'alarms' took longer than verifier.timeout_s (0.4 s)",
        "exits": "verifier 'exits' took its process down: it exited with status 3",
        "segfaults": f"verifier 'segfaults' took its process down: it died of signal {signal.SIGSEGV.value}",
        "raises": "verifier 'raises' raised ZeroDivisionError: no such luck with x",
        "none": "verifier 'gives_none' returned None instead of a Verdict",
        "nan reward": "verifier 'gives_reward' gave the reward nan",
        "inf reward": "verifier 'gives_reward' gave the reward inf",
        "none reward": "verifier 'gives_reward' gave the reward None",
        "text reward": "verifier 'gives_reward' gave the reward 1.0",
        "hoards": "verifier 'hoards' raised MemoryError: ",
    }
    assert verdicts["hangs"].elapsed_ms == 1000 * TIMEOUT_S


def test_pool_is_refilled_after_every_hang(hostile: ProcessVerifierPool) -> None:
    before = hostile.worker_pids()
    started = time.monotonic()
    verdicts = judge(hostile, {"a": ("hangs", ""), "b": ("hangs", ""), "c": ("good", "42")})
    assert [verdicts[key].reason for key in "abc"] == [
        VerdictReason.TIMEOUT, VerdictReason.TIMEOUT, VerdictReason.CORRECT,
    ]  # fmt: skip
    assert time.monotonic() - started > 2 * TIMEOUT_S
    assert len(hostile.worker_pids()) == 1
    assert hostile.worker_pids() != before
    assert not is_alive(before[0])


def test_long_text_is_cut_before_it_is_judged(hostile: ProcessVerifierPool) -> None:
    verdicts = judge(hostile, {"long": ("counts_characters", "x" * 1000), "short": ("counts_characters", "x" * 9)})
    assert (verdicts["long"].extracted, verdicts["short"].extracted) == ("100", "9")


def test_off_the_main_thread(hostile: ProcessVerifierPool) -> None:
    """Signal-based deadlines exist on the main thread only (verl 5635, trl 5281)."""
    found: dict[str, Verdict] = {}
    thread = threading.Thread(
        target=lambda: found.update(judge(hostile, {"t/hang": ("hangs", ""), "t/good": ("good", "42")}))
    )
    thread.start()
    thread.join()
    assert found["t/hang"].reason is VerdictReason.TIMEOUT
    assert found["t/good"].reason is VerdictReason.CORRECT


def test_a_worker_killed_while_idle_costs_nothing(hostile: ProcessVerifierPool) -> None:
    judge(hostile, {"before": ("good", "42")})
    (pid,) = hostile.worker_pids()
    os.kill(pid, signal.SIGKILL)
    assert wait_until_gone(pid, 5)
    assert judge(hostile, {"after": ("good", "42")})["after"].reason is VerdictReason.CORRECT


def test_collect_without_anything_pending_returns_at_once(hostile: ProcessVerifierPool) -> None:
    started = time.monotonic()
    assert hostile.collect(30.0) == {}
    assert time.monotonic() - started < 5


def test_misuse(hostile: ProcessVerifierPool) -> None:
    with pytest.raises(ConfigError, match="prompt p wants the verifier 'intager'; there are "):
        hostile.submit("k", prompt("intager"), "1")
    hostile.submit("twice", prompt("good"), "42")
    with pytest.raises(ValueError, match="twice was submitted twice"):
        hostile.submit("twice", prompt("good"), "42")
    while "twice" not in hostile.collect(1.0):
        pass
    with pytest.raises(ValueError, match="module-level function of an importable module"):
        ProcessVerifierPool(VerifierConfig(), verifiers={"local": lambda reward: HOSTILE["good"](reward)})
