"""The verifier pool's processes from start to end: none heavy, none left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from grpo_lib.config import VerifierConfig
from grpo_lib.errors import VerifierOutage
from grpo_lib.verifiers.pool import ProcessVerifierPool
from tests.unit.hostile_verifiers import HOSTILE, cannot_start
from tests.unit.verifier_cases import TIMEOUT_S, is_alive, judge, prompt, wait_until_gone

ROOT = Path(__file__).resolve().parents[2]


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
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("verifier-")]
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


def test_workers_are_light_and_fast() -> None:
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
