"""What `fit` writes is whole or absent, also when the disk is full: /dev/full ends every write with ENOSPC."""

from __future__ import annotations

import json
import logging
import os
from itertools import groupby
from pathlib import Path

import pytest

from grpo_lib.algo.advantages import assess_group
from grpo_lib.errors import RankFailure, StorageError
from grpo_lib.loop import StepRecord
from grpo_lib.stages.checkpoints import CheckpointState, checkpoints_of, newest_complete
from grpo_lib.stages.recorder import DiskRecorder, read_certificates
from grpo_lib.stages.run_paths import RunPaths
from grpo_lib.tracking import MetricsFile
from tests.unit.algo_cases import make_group, make_rollout
from tests.unit.fakes import FakeEngine, FakeSync, FakeTrainer, small_config

FULL = Path("/dev/full")
NO_ROOM = r"cannot write .*No space left on device: .*bytes free on that disk; remove old runs, or point storage\.root"


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(run_id="GRPOFlow/1", run=tmp_path / "run", store=str(tmp_path / "store"))


def recorder(paths: RunPaths, trainer: FakeTrainer) -> DiskRecorder:
    return DiskRecorder(small_config(loop={"keep_checkpoints": 2}), paths, trainer=trainer)


def record(step: int) -> StepRecord:
    metrics = {"time/step_s": 2.0, "reward/mean": 0.5, "loss/policy": 0.0, "optim/grad_norm": 1.0}
    return StepRecord(step=step, policy_version=step, applied=True, metrics=metrics)


def store_rollouts(written: DiskRecorder, step: int) -> None:
    group = make_group([make_rollout(0, 1.0), make_rollout(1, 0.0)])
    written.rollouts(step, (group,), (assess_group(group, kind="centered", correct_reward=1.0),))


def test_a_checkpoint_says_where_the_run_stands(paths: RunPaths) -> None:
    trainer = FakeTrainer([], version=5)
    written = DiskRecorder(small_config(), paths, trainer=trainer, tracker_run_id="w1")
    written.checkpoint(6, {"position": 96}, 1)
    written.step(record(6))
    written.finish()
    point = newest_complete(paths)
    assert point is not None
    assert point.state == CheckpointState(
        run_id="GRPOFlow/1", steps_done=6, empty_steps=1, policy_version=5, prompts={"position": 96},
        tracker_run_id="w1",
    )  # fmt: skip
    assert (point.path / "state").read_text() == "version 5"


def test_rollouts_then_rows_then_the_checkpoint_reach_the_disk(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever kills the run at any point finds the rows of every checkpoint, and the rollouts of every row."""
    on_disk: list[str] = []
    flush = os.fsync

    def noted(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        flush(descriptor)
        on_disk.append("store" if path.is_relative_to(paths.store) else path.name)

    monkeypatch.setattr(os, "fsync", noted)
    written = recorder(paths, FakeTrainer([]))
    written.certificate(FakeSync([], FakeEngine([])).push(1))
    store_rollouts(written, 1)
    written.flush()
    assert [json.loads(line)["step"] for line in paths.rollout_index.read_text().splitlines()] == [1]
    written.checkpoint(1, {"position": 2}, 0)
    assert checkpoints_of(paths) == [], "its row is not there"
    written.step(record(1))
    written.finish()
    assert checkpoints_of(paths)
    order = [name for name, _ in groupby(on_disk) if not name.startswith(".partial")]
    assert order == [
        "store", "metrics.jsonl", "certificates.jsonl", "rollouts.jsonl", "loop.json", "manifest.json", "checkpoints",
    ]  # fmt: skip


def test_a_checkpoint_that_fails_behind_a_step_is_told_at_the_next_call(paths: RunPaths) -> None:
    trainer = FakeTrainer([], is_written=False)
    written = recorder(paths, trainer)
    written.checkpoint(2, {"position": 0}, 0)
    written.step(record(2))
    trainer.failure = RankFailure("trainer rank 1: written: StorageError: cannot write x: No space left on device")
    with pytest.raises(RankFailure, match="trainer rank 1: written: StorageError"):
        store_rollouts(written, 3)
    written.close()
    assert list(paths.checkpoints.iterdir()) == [], "the room of the broken one is free again"


def test_a_run_that_fails_keeps_the_checkpoint_that_was_being_written(
    paths: RunPaths, caplog: pytest.LogCaptureFixture
) -> None:
    written = recorder(paths, FakeTrainer([], is_written=False))
    written.checkpoint(2, {"position": 0}, 0)
    written.step(record(2))
    written.close()  # on the way out of a step that failed
    assert [path.name for path in checkpoints_of(paths)] == ["step-000002"]
    written = recorder(paths, FakeTrainer([]))
    written.checkpoint(4, {"position": 0}, 0)
    written.close()  # on the way out of the same step: its row is not there, and never will be
    assert [path.name for path in paths.checkpoints.iterdir()] == ["step-000002"]
    dead = FakeTrainer([], is_written=False)
    written = recorder(paths, dead)
    written.checkpoint(4, {"position": 0}, 0)
    written.step(record(4))
    dead.failure = RankFailure("trainer rank 0: the process died")
    with caplog.at_level(logging.ERROR):
        written.close()
    assert "the checkpoint under way is not kept: trainer rank 0: the process died" in caplog.text


def test_a_full_disk_is_named_by_every_file_of_a_run(paths: RunPaths) -> None:
    paths.run.mkdir()
    for path in (paths.metrics, paths.certificates, paths.rollout_index):
        path.symlink_to(FULL)
    written = recorder(paths, FakeTrainer([]))
    with pytest.raises(StorageError, match=NO_ROOM):
        MetricsFile(paths.metrics).append({"reward/mean": 0.5})
    with pytest.raises(StorageError, match=NO_ROOM):
        written.certificate(FakeSync([], FakeEngine([])).push(1))
    store_rollouts(written, 1)
    with pytest.raises(StorageError, match=NO_ROOM):
        written.flush()


def test_certificates_read_back(paths: RunPaths) -> None:
    written = recorder(paths, FakeTrainer([]))
    sync = FakeSync([], FakeEngine([]))
    certificates = [sync.push(version) for version in (0, 1)]
    for certificate in certificates:
        written.certificate(certificate)
    assert read_certificates(paths.certificates) == certificates
