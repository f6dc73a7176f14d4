"""Verifiers that hang, die and lie cost their own verdict and nothing else. Every worker here is a real process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_lib.config import VerifierConfig
from grpo_lib.errors import ConfigError, VerifierOutage
from grpo_lib.types import Prompt, Verdict, VerdictReason, VerdictState
from grpo_lib.verifiers.pool import ProcessVerifierPool
from tests.unit.hostile_verifiers import HOSTILE, cannot_start

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 0.4


@pytest.fixture(scope="module")
def hostile() -> Iterator[ProcessVerifierPool]:
    config = VerifierConfig(timeout_s=TIMEOUT_S, correct_reward=5.0, max_text_chars=100)
    with ProcessVerifierPool(config, verifiers=HOSTILE) as pool:
        yield pool


def prompt(verifier: str, answer: str = "42") -> Prompt:
    return Prompt(prompt_id="p", text="t", token_ids=(1, 2), answer=answer, dataset="d", verifier=verifier)


def judge(pool: ProcessVerifierPool, cases: dict[str, tuple[str, str]], *, limit_s: float = 60) -> dict[str, Verdict]:
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


def test_hostile_items_fail_alone(hostile: ProcessVerifierPool) -> None:
    bad = {
        "hangs": ("hangs", ""), "exits": ("exits", "3"), "segfaults": ("segfaults", ""), "raises": ("raises", "x"),
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
    assert {key for key in bad if verdicts[key].reason is VerdictReason.TIMEOUT} == {"hangs"}
    assert {verdicts[key].reason for key in bad if key != "hangs"} == {VerdictReason.CRASH}
    assert texts == {
        "hangs": "verifier 'hangs' took longer than verifier.timeout_s (0.4 s)",
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


def test_close_kills_what_hangs_and_what_it_started(tmp_path: Path) -> None:
    pool = ProcessVerifierPool(VerifierConfig(num_workers=2, timeout_s=600), verifiers=HOSTILE)
    pid_file = tmp_path / "pid"
    pool.submit("a", prompt("leaves_child"), str(pid_file))
    deadline = time.monotonic() + 60
    while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    child, workers = int(pid_file.read_text()), pool.worker_pids()
    assert is_alive(child)
    pool.close()
    assert workers
    assert not any(map(is_alive, workers))
    assert wait_until_gone(child, 5)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("verifier-") and thread.is_alive()
                and thread in pool._threads]  # fmt: skip
    pool.close()  # twice does no harm
    with pytest.raises(ValueError, match="closed verifier pool"):
        pool.submit("b", prompt("good"), "42")


def test_verifier_that_cannot_start_is_an_outage() -> None:
    with ProcessVerifierPool(VerifierConfig(), verifiers={"cannot_start": cannot_start}) as pool:
        pool.submit("a", prompt("cannot_start"), "42")
        with pytest.raises(VerifierOutage, match="RuntimeError: model file of the verifier is missing"):
            pool.collect(60.0)


def test_printing_verifier_does_not_print_into_the_output(capfd: pytest.CaptureFixture[str]) -> None:
    with ProcessVerifierPool(VerifierConfig(), verifiers=HOSTILE) as pool:
        judge(pool, {"a": ("prints", "42")})
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "noise" in captured.err


def test_workers_are_light_and_fast(capfd: pytest.CaptureFixture[str]) -> None:
    with ProcessVerifierPool(VerifierConfig()) as pool:
        judge(pool, {"warm": ("integer", "42")})
        (pid,) = pool.worker_pids()
        maps = Path(f"/proc/{pid}/maps").read_text()
        best_s = min(_seconds_for_a_step(pool, number) for number in range(10))
    for package in ("torch", "vllm", "transformers", "ray", "pyarrow"):
        assert f"/{package}/" not in maps
    assert best_s < 0.1  # 10 ms on a quiet core


def _seconds_for_a_step(pool: ProcessVerifierPool, number: int) -> float:
    started = time.perf_counter()
    verdicts = judge(pool, {f"{number}/{i}": ("integer", str(i)) for i in range(256)})
    assert [key for key, verdict in verdicts.items() if verdict.reward] == [f"{number}/42"]
    return time.perf_counter() - started


def test_workers_of_a_killed_parent_end_themselves() -> None:
    """One worker is idle and sees its pipe close; one hangs in C code and has only its alarm."""
    program = f"""
import os, time
from grpo_lib.config import VerifierConfig
from grpo_lib.types import Prompt
from grpo_lib.verifiers.pool import ProcessVerifierPool
from tests.unit.hostile_verifiers import HOSTILE
pool = ProcessVerifierPool(VerifierConfig(num_workers=2, timeout_s={TIMEOUT_S}), verifiers=HOSTILE)
prompt = Prompt(prompt_id="p", text="t", token_ids=(1,), answer="42", dataset="d", verifier="good")
for key in "ab":
    pool.submit(key, prompt, "42")
while len(pool.worker_pids()) < 2 or not pool.collect(0.1):
    pass
from dataclasses import replace
pool.submit("c", replace(prompt, verifier="hangs"), "")
time.sleep(0.2)
print(*pool.worker_pids(), flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    pids = [int(pid) for pid in done.stdout.split()]
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(pids) == 2
    assert all(wait_until_gone(pid, 30) for pid in pids)
