"""`fit` on a machine that has nothing of the run yet, and on one that has more than was published."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from grpo_lib.errors import StorageError
from grpo_lib.stages.adopt import adopt
from grpo_lib.stages.published import fetch_for_training, publish_checkpoint
from grpo_lib.stages.run_paths import RunPaths
from grpo_lib.stages.stored_run import open_run
from tests.unit.fakes import small_config


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
            table.write_text("".join(f"{row}\n" for row in range(1, step + 1)))
        checkpoint = paths.checkpoints / f"step-{step:06d}"
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / "state").write_text(f"of step {step}")
        publish_checkpoint(paths, checkpoint, loop=loop)


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
    assert there.metrics.read_text() == "1\n2\n3\n4\n"


def test_a_machine_that_got_further_than_it_published_keeps_what_it_has(here: RunPaths) -> None:
    train(here, 2)
    (here.checkpoints / "step-000004").mkdir()
    here.metrics.write_text("1\n2\n3\n4\n")
    fetch_for_training(here, from_shards=True)
    assert here.metrics.read_text() == "1\n2\n3\n4\n"


def test_a_damaged_publication_is_skipped_with_a_warning(
    here: RunPaths, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(here, 2, 4)
    (damaged,) = here.mirror().files(here.checkpoints / "step-000004")
    from grpo_lib.storage.s3_client import s3_client

    bucket, _, prefix = here.store.removeprefix("s3://").partition("/")
    objects = s3_client().list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]
    for key in (found["Key"] for found in objects if damaged.ref.key in found["Key"]):
        s3_client().put_object(Bucket=bucket, Key=key, Body=b"of step 9")
    there = elsewhere(here, tmp_path)
    fetch_for_training(there, from_shards=False)
    assert [path.name for path in there.checkpoints.iterdir()] == ["step-000002"]
    assert "checkpoint step-000004 cannot be fetched" in caplog.text


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
