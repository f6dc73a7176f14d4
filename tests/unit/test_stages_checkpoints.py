"""Checkpoints are complete or absent, and only those that are still whole are used; what is not kept goes."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from grpo_lib.errors import DataError, DeadlineExceeded, RankFailure, StorageError
from grpo_lib.stages import checkpoints
from grpo_lib.stages.checkpoints import (
    CheckpointState,
    CheckpointWriter,
    checkpoints_of,
    newest_complete,
    save_once,
    verified,
)
from grpo_lib.stages.run_paths import RunPaths
from grpo_lib.types import WrittenFile
from tests.unit.fakes import FakeTrainer, small_config

FULL = Path("/dev/full")
NO_ROOM = r"cannot write .*No space left on device: .*bytes free on that disk; remove old runs, or point storage\.root"


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(run_id="GRPOFlow/1", run=tmp_path / "run", store=str(tmp_path / "store"))


def state(step: int) -> CheckpointState:
    return CheckpointState(
        run_id="GRPOFlow/1",
        steps_done=step,
        empty_steps=0,
        policy_version=step,
        prompts={"position": 16 * step, "num_prompts": 7},
        tracker_run_id="w1",
    )


def writer(paths: RunPaths, trainer: FakeTrainer, **loop: int) -> CheckpointWriter:
    return CheckpointWriter(paths, trainer, loop=small_config(loop={"checkpoint_every": 1, **loop}).loop)


def write(paths: RunPaths, *steps: int, **loop: int) -> None:
    written = writer(paths, FakeTrainer([]), **loop)
    for step in steps:
        written.begin(state(step))
        written.recorded(step)
    written.finish()
    written.close()


def complete(written: CheckpointWriter, step: int) -> None:
    written.recorded(step)
    written.finish()


def names(paths: RunPaths) -> list[str]:
    return sorted(path.name for path in paths.checkpoints.iterdir())


def test_the_newest_are_kept_and_every_m_th(paths: RunPaths) -> None:
    write(paths, *range(1, 9), keep_checkpoints=2, keep_every=3)
    assert names(paths) == ["step-000003", "step-000006", "step-000007", "step-000008"]
    write(paths, 9, keep_checkpoints=1)
    assert names(paths) == ["step-000009"]


def test_the_newest_is_read_back(paths: RunPaths) -> None:
    assert newest_complete(paths) is None
    write(paths, 2, 4)
    point = newest_complete(paths)
    assert point is not None
    assert point.path == paths.checkpoints / "step-000004"
    assert point.state == state(4)
    earlier = newest_complete(paths, at_most=3)
    assert earlier is not None
    assert earlier.state == state(2)
    assert newest_complete(paths, at_most=1) is None


def test_a_checkpoint_with_other_fields_is_of_another_version(paths: RunPaths) -> None:
    write(paths, 4)
    (path,) = checkpoints_of(paths)
    fields = json.loads((path / "loop.json").read_text())
    (path / "loop.json").write_text(json.dumps({**fields, "monitors": {}}))
    checkpoints._write_manifest(path, [checkpoints._written(path / name) for name in ("state", "loop.json")])
    with pytest.raises(DataError, match=r"was written by another version: loop\.json: .*'monitors'"):
        verified(path)


def test_a_checkpoint_is_written_behind_the_next_step(paths: RunPaths) -> None:
    trainer = FakeTrainer([], version=3, is_written=False)
    written = writer(paths, trainer)
    written.begin(state(3))
    written.recorded(3)
    assert checkpoints_of(paths) == []
    trainer.version = 4  # the next step
    written.poll()
    assert checkpoints_of(paths) == [], "a rank still writes"
    trainer.is_written = True
    written.poll()
    written.finish()
    (path,) = checkpoints_of(paths)
    assert (path / "state").read_text() == "version 3"


def test_the_next_checkpoint_waits_for_the_one_before(paths: RunPaths) -> None:
    journal: list[str] = []
    trainer = FakeTrainer(journal, is_written=False)
    written = writer(paths, trainer)
    for step in (1, 2):
        trainer.version = step
        written.begin(state(step))
        written.recorded(step)
        assert len(checkpoints_of(paths)) == step - 1
    assert journal == ["save v1", "save v2"]
    written.finish()
    assert [(path / "state").read_text() for path in checkpoints_of(paths)] == ["version 1", "version 2"]


def test_whoever_is_told_of_a_checkpoint_finds_it_whole(paths: RunPaths) -> None:
    told: list[tuple[int, int]] = []

    def look(path: Path) -> None:
        told.append((verified(path).state.steps_done, len(checkpoints_of(paths))))

    loop = small_config(loop={"checkpoint_every": 1, "keep_checkpoints": 1}).loop
    written = CheckpointWriter(paths, FakeTrainer([]), loop=loop, on_visible=look)
    for step in (1, 2):
        written.begin(state(step))
        written.recorded(step)
    written.finish()
    assert told == [(1, 1), (2, 2)], "the older one goes after the newer one is safe"


# --- What fails -----------------------------------------------------------------------------------------------------


def fail_on_a_rank(trainer: FakeTrainer, paths: RunPaths) -> None:
    trainer.failure = RankFailure("trainer rank 1: written: StorageError: cannot write x: No space left on device")


def fail_by_a_deadline(trainer: FakeTrainer, paths: RunPaths) -> None:
    """It is an OSError by type, and must not be taken for one of the disk."""
    trainer.failure = DeadlineExceeded(
        stage="written", waited_for="trainer rank 0", deadline_s=1.0, setting="deadlines.train_s"
    )


def fail_on_the_drivers_disk(trainer: FakeTrainer, paths: RunPaths) -> None:
    (partial,) = paths.checkpoints.glob(".partial-*")
    (partial / "loop.json").symlink_to(FULL)


@pytest.mark.parametrize(
    ("spoil", "kind", "message"),
    [
        (fail_on_a_rank, RankFailure, "trainer rank 1: written: StorageError"),
        (fail_by_a_deadline, DeadlineExceeded, r"trainer rank 0 did not arrive .* deadlines\.train_s"),
        (fail_on_the_drivers_disk, StorageError, NO_ROOM),
    ],
)
def test_what_cannot_be_written_leaves_the_earlier_ones_and_nothing_else(
    paths: RunPaths, spoil: Callable[[FakeTrainer, RunPaths], None], kind: type[Exception], message: str
) -> None:
    write(paths, 2)
    trainer = FakeTrainer([], is_written=False)
    written = writer(paths, trainer)
    written.begin(state(4))
    spoil(trainer, paths)
    with pytest.raises(kind, match=message):
        complete(written, 4)
    assert names(paths) == ["step-000002"], "the room of the broken one is free again"
    trainer.failure = None
    written.begin(state(4))
    complete(written, 4)
    assert names(paths) == ["step-000002", "step-000004"]


def test_an_interrupt_takes_no_file_from_a_checkpoint_that_is_being_completed(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = writer(paths, FakeTrainer([]))
    go_on = threading.Event()
    write_manifest = checkpoints._write_manifest

    def late(folder: Path, files: Sequence[WrittenFile]) -> None:
        go_on.wait()
        write_manifest(folder, files)

    def interrupted(future: Future[None]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "_write_manifest", late)
    written.begin(state(2))
    with monkeypatch.context() as patched:
        patched.setattr(Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            complete(written, 2)
    go_on.set()
    written.close()
    assert verified(paths.checkpoints / "step-000002").state == state(2)


def test_a_failure_behind_the_training_ends_the_next_checkpoint(paths: RunPaths) -> None:
    trainer = FakeTrainer([], is_written=False)
    written = writer(paths, trainer)
    written.begin(state(2))
    written.recorded(2)
    fail_on_a_rank(trainer, paths)
    with pytest.raises(RankFailure, match="trainer rank 1"):
        written.begin(state(4))


def test_a_folder_that_cannot_be_made(paths: RunPaths) -> None:
    paths.run.mkdir()
    paths.checkpoints.write_text("a file")
    with pytest.raises(StorageError, match=rf"cannot write {paths.checkpoints}/step-000002: .* storage\.root"):
        writer(paths, FakeTrainer([])).begin(state(2))


def test_what_a_killed_attempt_left_is_neither_used_nor_kept(paths: RunPaths) -> None:
    """Half-written, or whole but without its name: both are absent."""
    write(paths, 2)
    killed = writer(paths, FakeTrainer([]))
    killed.begin(state(4))
    shutil.copytree(paths.checkpoints / "step-000002", paths.checkpoints / ".partial-step-000006-0123abcd")
    point = newest_complete(paths)
    assert point is not None
    assert point.state.steps_done == 2
    writer(paths, FakeTrainer([]))
    assert names(paths) == ["step-000002"]


def test_a_removal_that_is_interrupted_leaves_no_half_checkpoint(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupted(path: Path, **_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write(paths, 2, 4, keep_checkpoints=1)
    assert [path.name for path in checkpoints_of(paths)] == ["step-000004"]
    with caplog.at_level(logging.WARNING):
        assert newest_complete(paths) is not None
    assert not caplog.text


# --- Damage ---------------------------------------------------------------------------------------------------------


def remove_state(path: Path) -> None:
    (path / "state").unlink()


def flip_a_bit(path: Path) -> None:
    content = bytearray((path / "state").read_bytes())
    content[3] ^= 1
    (path / "state").write_bytes(content)


def cut_off(path: Path) -> None:
    (path / "state").write_bytes((path / "state").read_bytes()[:-1])


def remove_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def cut_manifest(path: Path) -> None:
    (path / "manifest.json").write_bytes((path / "manifest.json").read_bytes()[:40])


def empty_manifest(path: Path) -> None:
    """As a file system can leave it after a power cut."""
    (path / "manifest.json").write_bytes(b"")


def forget_a_file(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["files"]["state"]
    (path / "manifest.json").write_text(json.dumps(manifest))


def change_the_position(path: Path) -> None:
    (path / "loop.json").write_text((path / "loop.json").read_text().replace('"position": 64', '"position": 32'))


DAMAGES = [
    (remove_state, r"state cannot be read: No such file or directory"),
    (flip_a_bit, r"state has other bytes: sha256 [0-9a-f]{12}… not [0-9a-f]{12}…"),
    (cut_off, r"state has 8 of 9 bytes"),
    (remove_manifest, r"manifest\.json cannot be read: No such file or directory"),
    (cut_manifest, r"manifest\.json is not valid JSON: "),
    (empty_manifest, r"manifest\.json is not valid JSON: "),
    (forget_a_file, r"manifest\.json was changed after it was written"),
    (change_the_position, r"loop\.json has other bytes: "),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_a_damaged_one_is_skipped_and_the_warning_says_why(
    paths: RunPaths, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], reason: str
) -> None:
    write(paths, 2, 4)
    damage(paths.checkpoints / "step-000004")
    with caplog.at_level(logging.WARNING):
        point = newest_complete(paths)
    assert point is not None
    assert point.state == state(2)
    (warning,) = [record.getMessage() for record in caplog.records]
    with pytest.raises(DataError, match=reason) as caught:
        verified(paths.checkpoints / "step-000004")
    assert warning == f"{caught.value}; it is not used, an older checkpoint is"
    assert warning.startswith(f"checkpoint {paths.checkpoints / 'step-000004'} is damaged: ")


def test_when_all_are_damaged_there_is_none(paths: RunPaths, caplog: pytest.LogCaptureFixture) -> None:
    write(paths, 2, 4)
    for path in checkpoints_of(paths):
        flip_a_bit(path)
    with caplog.at_level(logging.WARNING):
        assert newest_complete(paths) is None
    assert len(caplog.records) == 2


@pytest.mark.parametrize("name", ["state", "manifest.json"])
@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_a_disk_that_fails_is_not_taken_for_damage(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    write(paths, 2, 4)
    opened = Path.open

    def failing(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name == name:
            raise OSError(code, os.strerror(code), str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", failing)
    with pytest.raises(StorageError, match=rf"cannot read .*step-000004/{name}: {os.strerror(code)}; check the disk"):
        newest_complete(paths)


# --- The base model's shards ----------------------------------------------------------------------------------------


def test_a_state_without_a_loop_is_written_at_once_and_whole_or_not_at_all(paths: RunPaths) -> None:
    save_once(FakeTrainer([]), paths.shards)
    assert sorted(path.name for path in paths.shards.iterdir()) == ["manifest.json", "state"]
    trainer = FakeTrainer([])
    fail_on_a_rank(trainer, paths)
    with pytest.raises(RankFailure):
        save_once(trainer, paths.run / "others")
    assert sorted(path.name for path in paths.run.iterdir()) == ["shards"]
