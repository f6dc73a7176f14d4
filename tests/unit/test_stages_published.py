"""`fit` on a machine that has nothing of the run yet, and on one that has more than was published."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from grpo_lib.config import with_overrides
from grpo_lib.errors import ArtifactLost, ConfigError, DataError, StorageError
from grpo_lib.stages.adopt import adopt
from grpo_lib.stages.attempts import attempt
from grpo_lib.stages.checkpoints import CheckpointState, CheckpointWriter
from grpo_lib.stages.continuation import starting_point
from grpo_lib.stages.lost_steps import truncate_to
from grpo_lib.stages.parity_report import trained_checkpoint
from grpo_lib.stages.published import fetch_for_training, publish_checkpoint
from grpo_lib.stages.run_paths import RunPaths
from grpo_lib.stages.stored_run import open_run, write_run
from grpo_lib.storage.mirror import RunMirror
from grpo_lib.storage.s3_client import s3_client
from tests.unit.fakes import FakeTrainer, small_config


@pytest.fixture
def here(bucket: str, tmp_path: Path) -> RunPaths:
    """The machine that trained first."""
    paths = RunPaths(run_id="GRPOFlow/7", run=tmp_path / "here" / "7", store=f"s3://{bucket}/team")
    for folder in (paths.data, paths.shards):
        folder.mkdir(parents=True)
        (folder / "file").write_text(folder.name)
    paths.mirror().publish(paths.data, paths.shards)
    return paths


def train(paths: RunPaths, *steps: int, keep: int = 2, keep_every: int = 0) -> None:
    loop = small_config(loop={"keep_checkpoints": keep, "keep_every": keep_every}).loop
    for step in steps:
        for table in paths.step_tables:
            table.write_text("".join(f'{{"step": {row}, "policy_version": {row}}}\n' for row in range(1, step + 1)))
        writer = CheckpointWriter(
            paths,
            FakeTrainer([], version=step),
            loop=loop,
            on_visible=lambda path: publish_checkpoint(paths, path, loop=loop),
        )
        prompts = {"position": step, "num_prompts": 9}
        writer.begin(
            CheckpointState(run_id=paths.run_id, steps_done=step, empty_steps=0, policy_version=step, prompts=prompts)
        )
        writer.recorded(step)
        writer.finish()
        writer.close()


def damage_in_the_store(paths: RunPaths, step: int) -> None:
    client = s3_client()
    bucket, _, prefix = paths.store.removeprefix("s3://").partition("/")
    keys = {file.ref.key for file in paths.mirror().files(paths.checkpoints / f"step-{step:06d}")}
    for found in client.list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]:
        if any(key in found["Key"] for key in keys):
            client.put_object(Bucket=bucket, Key=found["Key"], Body=b"damaged")


def names(paths: RunPaths) -> list[str]:
    return sorted(path.name for path in paths.checkpoints.iterdir())


def published(paths: RunPaths) -> list[str]:
    return [path.name for path in paths.mirror().published(paths.checkpoints)]


def rows(paths: RunPaths) -> int:
    return len(paths.metrics.read_text().splitlines())


def elsewhere(paths: RunPaths, tmp_path: Path) -> RunPaths:
    return replace(paths, run=tmp_path / "there" / "7")


def test_another_machine_gets_the_inputs_and_the_newest_checkpoint_with_its_rows(
    here: RunPaths, tmp_path: Path
) -> None:
    train(here, 2, 4)
    there = elsewhere(here, tmp_path)
    fetch_for_training(there, from_shards=True)
    assert (there.data / "file").read_text() == "data"
    assert (there.shards / "file").read_text() == "shards"
    assert [path.name for path in there.checkpoints.iterdir()] == ["step-000004"]
    assert rows(there) == 4


def test_a_machine_that_got_further_than_it_published_keeps_what_it_has(here: RunPaths) -> None:
    train(here, 2, 4)
    here.mirror().withdraw(here.checkpoints / "step-000004")
    here.metrics.write_text(here.metrics.read_text() + "{}\n")
    fetch_for_training(here, from_shards=True)
    assert rows(here) == 5


def test_a_damaged_publication_is_skipped_with_a_warning(
    here: RunPaths, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(here, 2, 4)
    damage_in_the_store(here, 4)
    there = elsewhere(here, tmp_path)
    fetch_for_training(there, from_shards=False)
    assert names(there) == ["step-000002"]
    assert "checkpoint step-000004 cannot be fetched" in caplog.text
    assert trained_checkpoint(there, policy_version=2).name == "step-000002"
    with pytest.raises(DataError, match=r"no usable checkpoint holds policy version 4, .* continue the run from fit"):
        trained_checkpoint(there, policy_version=4)


def test_a_damaged_copy_here_does_not_hide_a_good_publication(here: RunPaths) -> None:
    train(here, 2, 4)
    (here.checkpoints / "step-000004" / "state").write_text("damaged")
    fetch_for_training(here, from_shards=False)
    assert (here.checkpoints / "step-000004" / "state").read_text() == "version 4"


def test_a_store_that_fails_is_not_taken_for_damage(
    here: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(here, 2, 4)
    fetch = RunMirror.fetch

    def failing(mirror: RunMirror, *paths: Path) -> None:
        if paths[-1].name == "step-000004":
            raise StorageError("503 after 8 attempts")
        fetch(mirror, *paths)

    monkeypatch.setattr(RunMirror, "fetch", failing)
    with pytest.raises(StorageError, match="503"):
        fetch_for_training(elsewhere(here, tmp_path), from_shards=False)


def test_where_all_are_damaged_nothing_begins_again_unasked(here: RunPaths, tmp_path: Path) -> None:
    train(here, 2, 4)
    damage_in_the_store(here, 2)
    damage_in_the_store(here, 4)
    message = r"(?s)none can be used: .*step-000004.*step-000002.*move s3://\S+/GRPOFlow/7/published/checkpoints/ else"
    with pytest.raises(DataError, match=message):
        fetch_for_training(elsewhere(here, tmp_path), from_shards=False)


def test_a_lost_table_leaves_no_checkpoint_without_its_rows(
    here: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(here, 2)
    there = elsewhere(here, tmp_path)
    files = RunMirror.files

    def lost(mirror: RunMirror, path: Path) -> object:
        if path == there.metrics:
            raise ArtifactLost("the metrics are gone")
        return files(mirror, path)

    monkeypatch.setattr(RunMirror, "files", lost)
    with pytest.raises(DataError, match="the metrics are gone"):
        fetch_for_training(there, from_shards=False)
    assert not there.checkpoints.exists()


def test_publications_of_lost_steps_are_withdrawn(here: RunPaths, tmp_path: Path) -> None:
    train(here, 2, 4, 6, keep=3)
    damage_in_the_store(here, 6)
    there = elsewhere(here, tmp_path)
    config = small_config()
    fetch_for_training(there, from_shards=False)
    with attempt(there, stage="fit") as current:
        point = starting_point(config, there, current)
    assert point is not None
    truncate_to(there, point.state)
    assert published(there) == ["step-000002", "step-000004"]
    train(there, 5, keep=1)
    assert published(there) == ["step-000005"], "not removed as older than the one of the lost steps"
    truncate_to(there, None)
    assert published(there) == []


def test_a_resumed_run_on_a_fresh_machine_knows_its_origin_and_its_configuration(
    here: RunPaths, tmp_path: Path
) -> None:
    config = small_config()
    train(here, 2)
    own = replace(here, run_id="GRPOFlow/9", run=tmp_path / "first" / "9")
    write_run(here, run_id=here.run_id, config=config, config_hash="hash", lineage={})
    adopt(here, run_id=own.run_id, origins=[here.run_id], step="fit", config=config, config_hash="hash", lineage={})
    fresh = replace(own, run=tmp_path / "fresh" / "9")
    fetch_for_training(fresh, from_shards=False)
    with attempt(fresh, stage="fit") as current:
        point = starting_point(config, fresh, current)
        assert point is not None
        assert point.state.run_id == here.run_id
        with pytest.raises(ConfigError, match=r"trainer\.learning_rate is"):
            starting_point(with_overrides(config, ["trainer.learning_rate=0.5"]), fresh, current)


def test_a_damaged_newest_checkpoint_of_the_origin_is_not_adopted(here: RunPaths, tmp_path: Path) -> None:
    train(here, 2, 4)
    damage_in_the_store(here, 4)
    own = adopt(
        elsewhere(here, tmp_path),
        run_id="GRPOFlow/9",
        origins=["GRPOFlow/7"],
        step="fit",
        config=small_config(),
        config_hash="hash",
        lineage={},
    )
    assert names(own) == published(own) == ["step-000002"]


def test_the_store_keeps_what_the_folder_keeps(here: RunPaths) -> None:
    train(here, 2, 4, 6, 8, 10, keep=2, keep_every=4)
    published = [path.name for path in here.mirror().published(here.checkpoints)]
    assert published == ["step-000004", "step-000008", "step-000010"]


def test_an_input_that_was_never_published_is_named(bucket: str, tmp_path: Path) -> None:
    paths = RunPaths(run_id="GRPOFlow/8", run=tmp_path / "8", store=f"s3://{bucket}/team")
    with pytest.raises(StorageError, match="GRPOFlow/8 has no data in"):
        fetch_for_training(paths, from_shards=True)


def test_a_resumed_run_brings_its_origins_files_into_its_own_folder(here: RunPaths, tmp_path: Path) -> None:
    train(here, 2, 4)
    config = small_config()
    there = elsewhere(here, tmp_path)
    own = adopt(
        there,
        run_id="GRPOFlow/9",
        origins=["GRPOFlow/7"],
        step="fit",
        config=config,
        config_hash="hash",
        lineage={},
    )
    assert not there.run.exists(), "nothing is written into the origin's folder"
    assert [path.name for path in own.checkpoints.iterdir()] == ["step-000004"]
    assert own.metrics.read_text() == here.metrics.read_text()
    assert open_run(str(own.run)).origins == ("GRPOFlow/7",)
    assert own.checkpoints / "step-000004" in own.mirror().published(own.checkpoints)
