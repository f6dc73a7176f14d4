"""A step that is tried again starts clean, and a failure on the way out hides no failure before it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from grpo_lib.algo.advantages import assess_group
from grpo_lib.errors import StorageError
from grpo_lib.loop import StepRecord
from grpo_lib.stages.lost_steps import truncate_to
from grpo_lib.stages.recorder import DiskRecorder
from grpo_lib.stages.run_paths import RunPaths, clear
from tests.unit.algo_cases import make_group, make_rollout
from tests.unit.fakes import FakeTrainer, small_config


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(run_id="GRPOFlow/1", run=tmp_path / "run", store=str(tmp_path / "store"))


def recorder(paths: RunPaths, *, steps: int = 3) -> DiskRecorder:
    return DiskRecorder(small_config(loop={"steps": steps}), paths, trainer=FakeTrainer([]))


def record(step: int, *, seconds: float = 2.0) -> StepRecord:
    metrics = {"time/step_s": seconds, "reward/mean": 0.5, "loss/policy": 0.0, "optim/grad_norm": 1.0}
    return StepRecord(step=step, policy_version=step, applied=True, metrics=metrics)


def begin_rollouts_that_cannot_be_stored(written: DiskRecorder, paths: RunPaths) -> None:
    Path(paths.store).write_text("a file where the store's folder belongs")
    group = make_group([make_rollout(0, 1.0), make_rollout(1, 0.0)])
    written.rollouts(1, (group,), (assess_group(group, kind="centered", correct_reward=1.0),))


def test_results_of_an_earlier_attempt_of_fit_are_gone_and_everything_else_stays(paths: RunPaths) -> None:
    kept = [
        *(paths.data / "manifest.json", paths.shards / "trainer.json", Path(paths.store) / "objects"),
        *(paths.tracking / "a", paths.metrics, paths.certificates, paths.rollout_index),
        paths.checkpoints / "step-000002" / "loop.json",
    ]
    left = [
        *(paths.metrics.with_suffix(".parquet"), paths.evaluation, paths.parity),
        paths.export / "config.json",
    ]
    for path in [*kept, *left]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("of the first attempt")
    clear(*paths.after_training)
    assert [path.exists() for path in kept] == [True] * len(kept)
    assert [path.exists() for path in left] == [False] * len(left)


def test_clearing_what_is_not_there_is_fine(paths: RunPaths) -> None:
    clear(*paths.after_training)
    assert not paths.run.exists()


def test_a_second_attempt_has_one_row_per_step(paths: RunPaths) -> None:
    for _ in range(2):
        truncate_to(paths, None)
        clear(*paths.after_training)
        written = recorder(paths)
        for step in (1, 2):
            written.step(record(step))
        written.finish()
        written.close()
    assert [json.loads(line)["step"] for line in paths.metrics.read_text().splitlines()] == [1, 2]
    assert pq.read_table(paths.metrics.with_suffix(".parquet"))["step"].to_pylist() == [1, 2]


def test_rollouts_that_cannot_be_stored_stop_the_step_that_waits_for_them(paths: RunPaths) -> None:
    written = recorder(paths)
    begin_rollouts_that_cannot_be_stored(written, paths)
    with pytest.raises(StorageError, match="cannot write"):
        written.flush()
    written.close()


def test_rollouts_that_cannot_be_stored_do_not_hide_the_failure_of_their_step(
    paths: RunPaths, caplog: pytest.LogCaptureFixture
) -> None:
    written = recorder(paths)
    begin_rollouts_that_cannot_be_stored(written, paths)
    with caplog.at_level(logging.ERROR):
        written.close()  # on the way out of a step that failed before it waited for its rollouts
    assert "are not stored either: cannot write" in caplog.text


def test_a_damaged_metrics_file_does_not_hide_the_failure_of_a_run(paths: RunPaths) -> None:
    written = recorder(paths)
    written.step(record(1))
    with paths.metrics.open("a") as file:
        file.write('{"step": 2, "rewa')
    written.close()
    assert not paths.metrics.with_suffix(".parquet").exists()


def test_the_time_left_counts_days(paths: RunPaths, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        recorder(paths, steps=31).step(record(1, seconds=3600.0))
    assert "ETA 1 day, 6:00:00" in caplog.text
