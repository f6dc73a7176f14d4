"""A resumed run's tables hold the rows of the steps that its checkpoint remembers; others are moved, not deleted."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from grpo_lib.data import files
from grpo_lib.errors import DataError
from grpo_lib.stages.checkpoints import CheckpointState
from grpo_lib.stages.lost_steps import truncate_to
from grpo_lib.stages.run_paths import RunPaths

STEPS = 6
EMPTY_STEP = 3  # not applied: it has rows, and no version of its own


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A run that was killed after six steps."""
    paths = RunPaths(run_id="GRPOFlow/1", run=tmp_path / "run", store=str(tmp_path / "store"))
    paths.run.mkdir()
    for table in (paths.metrics, paths.rollout_index):
        table.write_text("".join(line({"step": step, "of": table.name}) for step in range(1, STEPS + 1)))
    paths.certificates.write_text("".join(line({"policy_version": version}) for version in range(STEPS)))
    return paths


def line(row: dict[str, object]) -> str:
    return json.dumps(row) + "\n"


def state(step: int) -> CheckpointState:
    version = step - (step >= EMPTY_STEP)
    return CheckpointState(run_id="GRPOFlow/1", steps_done=step, empty_steps=0, policy_version=version, prompts={})


def steps(table: Path) -> list[int]:
    return [json.loads(text)["step"] for text in table.read_text().splitlines()]


def versions(table: Path) -> list[int]:
    return [json.loads(text)["policy_version"] for text in table.read_text().splitlines()]


def lost(paths: RunPaths, stem: str) -> str:
    """All lines of a table that were moved aside."""
    return "".join(file.read_text() for file in sorted(paths.lost.glob(f"{stem}-*.jsonl")))


def test_later_rows_are_moved_aside(paths: RunPaths) -> None:
    truncate_to(paths, state(4))
    assert steps(paths.metrics) == steps(paths.rollout_index) == [1, 2, 3, 4]
    assert versions(paths.certificates) == [0, 1, 2, 3]
    assert lost(paths, "metrics") == "".join(line({"step": step, "of": "metrics.jsonl"}) for step in (5, 6))
    assert lost(paths, "rollouts") == "".join(line({"step": step, "of": "rollouts.jsonl"}) for step in (5, 6))
    assert lost(paths, "certificates") == "".join(line({"policy_version": version}) for version in (4, 5))


def test_what_fits_the_checkpoint_stays_as_it_is(paths: RunPaths) -> None:
    before = {table: table.read_bytes() for table in paths.step_tables}
    truncate_to(paths, state(STEPS))
    assert {table: table.read_bytes() for table in paths.step_tables} == before
    assert not paths.lost.exists()


def test_without_a_checkpoint_every_row_is_lost(paths: RunPaths) -> None:
    truncate_to(paths, None)
    assert [table.read_bytes() for table in paths.step_tables] == [b""] * 3
    assert len(lost(paths, "metrics").splitlines()) == STEPS
    truncate_to(RunPaths(run_id="GRPOFlow/2", run=paths.run / "new", store=paths.store), None)


@pytest.mark.parametrize("torn", ['{"step": 7, "rewa', '{"step": 7}', "\0\0\0\0"])
def test_a_line_that_a_crash_cut_off_is_moved_aside_too(paths: RunPaths, torn: str) -> None:
    with paths.metrics.open("a") as file:
        file.write(torn)
    truncate_to(paths, state(STEPS))
    assert steps(paths.metrics) == list(range(1, STEPS + 1))
    assert lost(paths, "metrics") == torn


def test_a_line_whose_end_a_crash_cut_off_is_no_row(paths: RunPaths) -> None:
    """The next row would be written behind it on the same line."""
    paths.metrics.write_text(paths.metrics.read_text().removesuffix("\n"))
    with pytest.raises(DataError, match="5 rows that end with steps"):
        truncate_to(paths, state(STEPS))


def test_a_second_attempt_lost_too_leaves_both(paths: RunPaths) -> None:
    truncate_to(paths, state(4))
    with paths.metrics.open("a") as file:
        file.write(line({"step": 5, "of": "the second attempt"}))
    with paths.rollout_index.open("a") as file:
        file.write(line({"step": 5, "of": "the second attempt"}))
    with paths.certificates.open("a") as file:
        file.write(line({"policy_version": 3}))  # the restored weights are sent again
    truncate_to(paths, state(4))
    assert steps(paths.metrics) == [1, 2, 3, 4]
    assert versions(paths.certificates) == [0, 1, 2, 3, 3]
    assert len(lost(paths, "metrics").splitlines()) == 3
    assert "the second attempt" in lost(paths, "metrics")


def test_a_crash_in_between_loses_nothing_and_doubles_nothing(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every rename: the table is old or new, and what goes is elsewhere before it goes."""
    whole = {table: table.read_text() for table in paths.step_tables}
    replace, allowed = os.replace, 0

    class Crash(BaseException):
        pass

    def crashing(source: Path, target: Path) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Crash
        replace(source, target)

    monkeypatch.setattr(files.os, "replace", crashing)
    while True:
        left = allowed
        try:
            truncate_to(paths, state(4))
        except Crash:
            for table, content in whole.items():
                found = table.read_text()
                assert found == content or found + lost(paths, table.stem) == content, (allowed, table)
            allowed += 1
        else:
            break
    assert allowed > 0
    for table, content in whole.items():
        assert table.read_text() + lost(paths, table.stem) == content
    assert not list(paths.run.rglob("*.part"))


def test_rows_that_the_checkpoint_vouches_for_must_be_there(paths: RunPaths) -> None:
    paths.metrics.write_text("".join(line({"step": step}) for step in (1, 2, 4)))
    with pytest.raises(DataError, match=r"metrics\.jsonl does not have one row for each of the 4 steps"):
        truncate_to(paths, state(4))
    paths.metrics.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2 is not JSON .* it was changed after it was written"):
        truncate_to(paths, state(3))


def test_later_checkpoints_make_way(paths: RunPaths) -> None:
    """They are damaged, or they would have been taken, and their steps will be written again."""
    for step in (4, 6):
        (paths.checkpoints / f"step-{step:06d}").mkdir(parents=True)
        (paths.checkpoints / f"step-{step:06d}" / "file").write_text(str(step))
    truncate_to(paths, state(4))
    assert [path.name for path in paths.checkpoints.iterdir()] == ["step-000004"]
    assert (paths.lost / "step-000006" / "file").read_text() == "6"
    (paths.checkpoints / "step-000006").mkdir()
    truncate_to(paths, state(4))
    assert sorted(path.name for path in paths.lost.glob("step-*")) == ["step-000006", "step-000006-2"]
