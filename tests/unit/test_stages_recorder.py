"""What `fit` writes is whole or absent, also when the disk is full: /dev/full ends every write with ENOSPC."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from grpo_lib.algo.advantages import assess_group
from grpo_lib.errors import DeadlineExceeded, RankFailure, StorageError
from grpo_lib.stages.checkpoints import checkpoints_of
from grpo_lib.stages.recorder import DiskRecorder, read_certificates
from grpo_lib.stages.run_paths import RunPaths
from grpo_lib.tracking import MetricsFile
from tests.unit.algo_cases import make_group, make_rollout
from tests.unit.fakes import FakeEngine, FakeSync, FakeTrainer, small_config

FULL = Path("/dev/full")
NO_ROOM = r"cannot write .*No space left on device: .*bytes free on that disk; remove old runs, or point storage\.root"


@dataclass
class SavingTrainer(FakeTrainer):
    """Writes one file, then fails as told; `full` names a file of the checkpoint that takes no bytes."""

    journal: list[str] = field(default_factory=list)
    failure: Exception | None = None
    full: str | None = None

    def save(self, path: Path) -> None:
        path.mkdir()
        (path / "state").write_text(f"version {self.version}")
        if self.full is not None:
            (path / self.full).symlink_to(FULL)
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(run_id="GRPOFlow/1", run=tmp_path / "run", store=str(tmp_path / "store"))


def recorder(paths: RunPaths, trainer: FakeTrainer) -> DiskRecorder:
    return DiskRecorder(small_config(loop={"keep_checkpoints": 2}), paths, trainer=trainer)


def everything(paths: RunPaths) -> list[str]:
    return sorted(path.name for path in paths.checkpoints.iterdir())


def test_checkpoints_carry_the_loops_state_and_only_the_last_are_kept(paths: RunPaths) -> None:
    trainer = SavingTrainer()
    written = recorder(paths, trainer)
    for step in (2, 4, 6):
        trainer.version = step - 1
        written.checkpoint(step, {"position": 16 * step}, 1)
    assert everything(paths) == ["step-000004", "step-000006"] == [path.name for path in checkpoints_of(paths)]
    newest = checkpoints_of(paths)[-1]
    assert json.loads((newest / "loop.json").read_text()) == {
        "steps_done": 6, "empty_steps": 1, "policy_version": 5, "prompts": {"position": 96},
    }  # fmt: skip
    assert (newest / "state").read_text() == "version 5"


@pytest.mark.parametrize(
    ("spoiled", "kind", "message"),
    [
        ({"full": "loop.json"}, StorageError, NO_ROOM),
        (
            {"failure": RankFailure("trainer rank 1: save: StorageError: cannot write x: No space left on device")},
            RankFailure,
            "trainer rank 1: save: StorageError",
        ),
        (
            # It is an OSError by type, and must not be taken for one of the disk.
            {
                "failure": DeadlineExceeded(
                    stage="save", waited_for="trainer rank 0", deadline_s=1.0, setting="deadlines.train_s"
                )
            },
            DeadlineExceeded,
            r"trainer rank 0 did not arrive .* deadlines\.train_s",
        ),
    ],
)
def test_a_checkpoint_that_cannot_be_written_leaves_the_earlier_ones_and_nothing_else(
    paths: RunPaths, spoiled: dict, kind: type[Exception], message: str
) -> None:
    recorder(paths, SavingTrainer()).checkpoint(2, {"position": 0}, 0)
    with pytest.raises(kind, match=message):
        recorder(paths, SavingTrainer(**spoiled)).checkpoint(4, {"position": 0}, 0)
    assert everything(paths) == ["step-000002"], "the room of the broken one is free again"
    recorder(paths, SavingTrainer()).checkpoint(4, {"position": 0}, 0)
    assert everything(paths) == ["step-000002", "step-000004"]


def test_a_checkpoint_folder_that_cannot_be_made(paths: RunPaths) -> None:
    paths.run.mkdir()
    paths.checkpoints.write_text("a file")
    with pytest.raises(StorageError, match=rf"cannot write {paths.checkpoints}/step-000002: .* storage\.root"):
        recorder(paths, SavingTrainer()).checkpoint(2, {"position": 0}, 0)


def test_a_full_disk_is_named_by_every_file_of_a_run(paths: RunPaths) -> None:
    paths.run.mkdir()
    for path in (paths.metrics, paths.certificates, paths.rollout_index):
        path.symlink_to(FULL)
    written = recorder(paths, SavingTrainer())
    with pytest.raises(StorageError, match=NO_ROOM):
        MetricsFile(paths.metrics).append({"reward/mean": 0.5})
    with pytest.raises(StorageError, match=NO_ROOM):
        written.certificate(FakeSync([], FakeEngine([])).push(1))
    group = make_group([make_rollout(0, 1.0), make_rollout(1, 0.0)])
    written.rollouts(1, (group,), (assess_group(group, kind="centered", correct_reward=1.0),))
    with pytest.raises(StorageError, match=NO_ROOM):
        written.flush()


def test_certificates_read_back(paths: RunPaths) -> None:
    written = recorder(paths, SavingTrainer())
    sync = FakeSync([], FakeEngine([]))
    certificates = [sync.push(version) for version in (0, 1)]
    for certificate in certificates:
        written.certificate(certificate)
    assert read_certificates(paths.certificates) == certificates
