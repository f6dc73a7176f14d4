"""One process at a time works on a run, and a dead one is told from a slow one."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from grpo_lib.errors import DataError, RunBusy
from grpo_lib.stages import attempts
from grpo_lib.stages.attempts import Attempt, ProcessName, attempt, attempts_of, holder_of
from grpo_lib.stages.run_paths import RunPaths


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(run_id="GRPOFlow/1", run=tmp_path / "run", store=str(tmp_path / "store"))


def hold(paths: RunPaths) -> None:
    with attempt(paths, stage="fit") as current:
        current.at_step(12)
        current.in_span("weight_sync")
        current.started({"engine 0": 4711})
        time.sleep(60)


@contextmanager
def held(paths: RunPaths) -> Iterator[int]:
    """Another process works on the run; its id."""
    process = multiprocessing.get_context("fork").Process(target=hold, args=(paths,))
    process.start()
    deadline = time.monotonic() + 10
    while (holder := holder_of(paths)) is None or holder.parts is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert process.pid is not None
    try:
        yield process.pid
    finally:
        process.kill()
        process.join()


def foreign(paths: RunPaths) -> None:
    """Make the page look as if its process were on another machine."""
    page = json.loads(paths.running.read_text())
    page["process"]["boot_id"] = "another machine's"
    paths.running.write_text(json.dumps(page))


def test_a_second_process_is_refused_and_told_who_is_at_work(paths: RunPaths) -> None:
    with held(paths) as pid, pytest.raises(RunBusy) as refused, attempt(paths, stage="fit"):
        pass
    assert f"attempt 1, process {pid} on " in str(refused.value)
    assert "in fit step 12 (weight_sync)" in str(refused.value)


def test_a_killed_process_leaves_the_run_free(paths: RunPaths) -> None:
    with held(paths) as pid:
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while ProcessName.is_alive(holder_of(paths).process):  # type: ignore[union-attr]
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with attempt(paths, stage="fit") as current:
            assert current.number == 2
            assert holder_of(paths).process.pid == os.getpid()  # type: ignore[union-attr]
    assert holder_of(paths) is None
    events = [(line["attempt"], line["event"]) for line in attempts_of(paths)]
    assert events == [(1, "begin"), (2, "begin"), (2, "done")]


def test_a_process_id_that_was_given_again_is_not_the_same_process(paths: RunPaths) -> None:
    with held(paths) as pid:
        page = json.loads(paths.running.read_text())
        page["process"] |= {"pid": os.getppid()}
        paths.running.write_text(json.dumps(page))
        with attempt(paths, stage="fit"):
            pass
        assert pid


def test_a_process_that_cannot_be_looked_up_is_alive_while_its_heart_beats(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "HEARTBEAT_S", 0.2)
    monkeypatch.setattr(attempts, "SILENT_S", 3.0)
    with held(paths) as pid:
        foreign(paths)
        with pytest.raises(RunBusy), attempt(paths, stage="fit"):
            pass
        os.kill(pid, signal.SIGKILL)
        with attempt(paths, stage="fit") as current:
            assert current.number == 2


def test_stages_of_one_process_are_one_attempt(paths: RunPaths) -> None:
    with attempt(paths, stage="resume") as outer:
        with attempt(paths, stage="fit") as inner:
            assert inner.number == outer.number == 1
            assert holder_of(paths).stage == "fit"  # type: ignore[union-attr]
        assert holder_of(paths).stage == "resume"  # type: ignore[union-attr]
    assert [(line["stage"], line["event"]) for line in attempts_of(paths)] == [
        ("resume", "begin"), ("fit", "begin"), ("fit", "done"), ("resume", "done"),
    ]  # fmt: skip


def test_a_failure_is_on_record_and_frees_the_run(paths: RunPaths) -> None:
    with pytest.raises(ValueError, match="no room"), attempt(paths, stage="fit"):
        raise ValueError("no room")
    assert attempts_of(paths)[-1]["error"] == "ValueError: no room"
    with attempt(paths, stage="fit") as current:
        assert current.number == 2


def test_a_long_report_is_followed_by_a_short_one(paths: RunPaths) -> None:
    with attempt(paths, stage="fit") as current:
        current.started({f"trainer rank {rank}": rank for rank in range(500)})
        assert len(holder_of(paths).parts) == 500  # type: ignore[union-attr,arg-type]
        current.started({})
        assert holder_of(paths).parts == {}  # type: ignore[union-attr]


def test_a_damaged_page_is_not_taken_for_a_free_run(paths: RunPaths) -> None:
    paths.run.mkdir()
    paths.running.write_text('{"attempt": 1, "proc')
    with pytest.raises(DataError, match=r"running\.json is damaged; remove it when no process works on the run"):
        holder_of(paths)
    with pytest.raises(DataError, match="is damaged"), attempt(paths, stage="fit"):
        pass


@pytest.mark.parametrize("torn", [b'{"attempt": 2, "eve', b"\x00\x00\xff", b"[1]"])
def test_a_line_that_was_cut_off_counts_for_nothing_and_the_next_starts_anew(paths: RunPaths, torn: bytes) -> None:
    with attempt(paths, stage="fit"):
        pass
    with paths.attempts.open("ab") as file:
        file.write(torn)
    with attempt(paths, stage="fit") as current:
        assert current.number == 2
    assert torn in paths.attempts.read_bytes().splitlines()
    assert [(line["attempt"], line["event"]) for line in attempts_of(paths)] == [
        (1, "begin"), (1, "done"), (2, "begin"), (2, "done"),
    ]  # fmt: skip


def test_an_attempt_whose_lines_were_lost_is_counted_by_its_page(paths: RunPaths) -> None:
    with held(paths) as pid:
        os.kill(pid, signal.SIGKILL)
    paths.attempts.write_text('{"attempt": 1, "eve')
    with attempt(paths, stage="fit") as current:
        assert current.number == 2


def test_a_failure_that_cannot_be_put_on_record_is_still_the_one_that_is_raised(
    paths: RunPaths, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        paths.attempts.unlink()
        paths.attempts.mkdir()
        raise ValueError("the first")

    with pytest.raises(ValueError, match="the first"), attempt(paths, stage="fit"):
        fail()
    assert "that attempt 1 failed is not on record: cannot write" in caplog.text
    assert holder_of(paths) is None


def test_a_heartbeat_that_fails_once_is_followed_by_the_next(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attempts, "HEARTBEAT_S", 0.02)
    beats = 0

    def beat(_: Attempt) -> None:
        nonlocal beats
        beats += 1
        if beats == 1:
            raise OSError("stale file handle")

    monkeypatch.setattr(Attempt, "beat", beat)
    with attempt(paths, stage="fit"):
        deadline = time.monotonic() + 10
        while beats < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert "no heartbeat on attempt 1's page this time: stale file handle" in caplog.text


def another_takes(paths: RunPaths, *, pid: int) -> None:
    """Another process has taken the run, as its page says."""
    page = json.loads(paths.running.read_text())
    page["attempt"] += 1
    page["process"] |= {"boot_id": "another machine's", "pid": pid}
    paths.running.write_text(json.dumps(page))


def test_a_process_that_lost_the_run_stops_and_leaves_the_new_holders_page(paths: RunPaths) -> None:
    def report(current: Attempt) -> None:
        another_takes(paths, pid=77)
        current.at_step(3)

    lost = r"not held by this process.*the holder now is attempt 2, process 77 on "
    with pytest.raises(RunBusy, match=lost), attempt(paths, stage="fit") as current:
        report(current)
    assert json.loads(paths.running.read_text())["process"]["pid"] == 77


def test_a_process_that_lost_the_run_leaves_its_page_to_the_new_holder_when_it_fails(paths: RunPaths) -> None:
    def fail() -> None:
        another_takes(paths, pid=77)
        raise ValueError("the first")

    with pytest.raises(ValueError, match="the first"), attempt(paths, stage="fit"):
        fail()
    assert json.loads(paths.running.read_text())["process"]["pid"] == 77


def test_a_process_that_lost_the_run_to_one_that_ended_stops_too(paths: RunPaths) -> None:
    def report(current: Attempt) -> None:
        paths.running.write_text("")
        current.in_span("pack")

    with pytest.raises(RunBusy, match="the holder now is nobody"), attempt(paths, stage="fit") as current:
        report(current)
    assert paths.running.read_text() == ""


def test_a_process_that_takes_the_run_while_another_is_watched_is_judged_itself(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with held(paths) as pid:
        own = paths.running.read_text()
        foreign(paths)
        waited = 0

        def look(_: float) -> None:
            nonlocal waited
            waited += 1
            paths.running.write_text(own)

        monkeypatch.setattr("grpo_lib.stages.attempts.time.sleep", look)
        with pytest.raises(RunBusy, match=f"process {pid} on "), attempt(paths, stage="fit"):
            pass
        assert waited == 1
        monkeypatch.undo()
