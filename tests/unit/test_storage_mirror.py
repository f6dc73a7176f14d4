"""Steps on machines that share no disk: each here has a folder of its own and the same store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_lib.errors import StorageError
from grpo_lib.storage.local import LocalStore
from grpo_lib.storage.locations import open_store
from grpo_lib.storage.mirror import RunMirror
from grpo_lib.storage.refs import ArtifactStore

RUN = "GRPOFlow/7"


@pytest.fixture
def store(bucket: str) -> ArtifactStore:
    return open_store(f"s3://{bucket}/runs-of-a-team")


@pytest.fixture
def here(store: ArtifactStore, tmp_path: Path) -> RunMirror:
    return RunMirror(store, run_id=RUN, folder=tmp_path / "here")


@pytest.fixture
def there(store: ArtifactStore, tmp_path: Path) -> RunMirror:
    return RunMirror(store, run_id=RUN, folder=tmp_path / "there")


def fill(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def contents(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_and_a_file_arrive_elsewhere(here: RunMirror, there: RunMirror, tmp_path: Path) -> None:
    fill(tmp_path / "here" / "data", manifest="m", shard="s")
    fill(tmp_path / "here" / "data" / "inner", deep="d")
    fill(tmp_path / "here", **{"metrics.jsonl": "1\n2\n"})
    here.publish(tmp_path / "here" / "data", tmp_path / "here" / "metrics.jsonl")
    there.fetch(tmp_path / "there" / "data", tmp_path / "there" / "metrics.jsonl")
    assert contents(tmp_path / "there") == contents(tmp_path / "here")


def test_what_is_equal_stays_and_all_else_is_replaced(here: RunMirror, there: RunMirror, tmp_path: Path) -> None:
    fill(tmp_path / "here" / "data", a="1", b="2")
    here.publish(tmp_path / "here" / "data")
    data = tmp_path / "there" / "data"
    there.fetch(data)
    before = (data / "a").stat().st_ino
    there.fetch(data)
    assert (data / "a").stat().st_ino == before
    fill(data, b="changed", left="of something else")
    there.fetch(data)
    assert contents(data) == {"a": "1", "b": "2"}
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["data"]


def test_the_last_publication_counts_and_a_withdrawn_one_is_gone(
    here: RunMirror, there: RunMirror, tmp_path: Path
) -> None:
    for step in (1, 2, 10):
        fill(tmp_path / "here" / "checkpoints" / f"step-{step:06d}", state=str(step))
        here.publish(tmp_path / "here" / "checkpoints" / f"step-{step:06d}")
    fill(tmp_path / "here" / "checkpoints" / "step-000002", state="again")
    here.publish(tmp_path / "here" / "checkpoints" / "step-000002")
    here.withdraw(tmp_path / "here" / "checkpoints" / "step-000001")
    checkpoints = tmp_path / "there" / "checkpoints"
    assert there.published(checkpoints) == [checkpoints / "step-000002", checkpoints / "step-000010"]
    there.fetch(*there.published(checkpoints))
    assert contents(checkpoints) == {"step-000002/state": "again", "step-000010/state": "10"}
    with pytest.raises(StorageError, match=r"run GRPOFlow/7 has no checkpoints/step-000001 in s3://.*/runs-of-a-team"):
        there.fetch(checkpoints / "step-000001")


def test_a_publication_that_was_interrupted_is_not_there(
    here: RunMirror, there: RunMirror, tmp_path: Path, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "here" / "model", a="old", b="old")
    here.publish(tmp_path / "here" / "model")
    fill(tmp_path / "here" / "model", a="new", b="new")
    put = store.put_file
    stored: list[Any] = []

    def second_fails(path: Path) -> Any:
        if stored:
            raise StorageError("no more room")
        stored.append(put(path))
        return stored[-1]

    monkeypatch.setattr(store, "put_file", second_fails)
    with pytest.raises(StorageError, match="no more room"):
        here.publish(tmp_path / "here" / "model")
    there.fetch(tmp_path / "there" / "model")
    assert contents(tmp_path / "there" / "model") == {"a": "old", "b": "old"}


def test_a_damaged_file_is_refused_and_what_was_there_stays(
    here: RunMirror, there: RunMirror, tmp_path: Path, bucket: str, s3_admin: Any
) -> None:
    fill(tmp_path / "here" / "data", a="1" * 100, b="2" * 100)
    here.publish(tmp_path / "here" / "data")
    data = fill(tmp_path / "there" / "data", a="of an earlier attempt")
    for found in s3_admin.list_objects_v2(Bucket=bucket, Prefix="runs-of-a-team/objects/")["Contents"]:
        s3_admin.put_object(Bucket=bucket, Key=found["Key"], Body=b"?" * 100)
    with pytest.raises(StorageError, match=rf"s3://{bucket}/.* was damaged after storing"):
        there.fetch(data)
    assert contents(tmp_path / "there") == {"data/a": "of an earlier attempt"}


def test_a_listed_name_cannot_leave_the_runs_folder(there: RunMirror, store: ArtifactStore, tmp_path: Path) -> None:
    entry = b'{"path": "../../outside", "key": "%s", "size_bytes": 1, "kind": "file"}' % (b"0" * 64)
    store.write_document(f"runs/{RUN}/published/data.json", b'{"format": 1, "files": [%s]}' % entry)
    with pytest.raises(StorageError, match=r"names '\.\./\.\./outside', which is not in the run's folder"):
        there.fetch(tmp_path / "there" / "data")


def test_with_a_local_store_nothing_is_copied(tmp_path: Path) -> None:
    mirror = RunMirror(LocalStore(tmp_path / "store"), run_id=RUN, folder=tmp_path / "run")
    fill(tmp_path / "run" / "data", a="1")
    mirror.publish(tmp_path / "run" / "data")
    mirror.fetch(tmp_path / "run" / "data")
    mirror.withdraw(tmp_path / "run" / "data")
    assert mirror.published() == []
    assert not (tmp_path / "store").exists()
