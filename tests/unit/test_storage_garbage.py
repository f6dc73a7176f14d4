"""`grpo store gc` and `verify`: on a folder and on S3, nothing that a run refers to is ever removed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from grpo_lib.errors import StorageError
from grpo_lib.storage.garbage import GarbagePlan, plan, remove, verify_all
from grpo_lib.storage.locations import open_store
from grpo_lib.storage.mirror import RunMirror
from grpo_lib.storage.refs import ArtifactStore, StoreRef
from grpo_lib.storage.registry import forget, known_runs, references

DAY = 86_400.0
Later = Callable[..., GarbagePlan]


@dataclass(frozen=True, kw_only=True)
class Site:
    """A store with one run, whose folder is on this machine."""

    store: ArtifactStore
    mirror: RunMirror
    folder: Path

    def put(self, text: str) -> StoreRef:
        path = self.folder.parent / "source"
        path.write_text(text)
        return self.store.put_file(path)

    def write(self, name: str, text: str) -> None:
        """A file that the run leaves, published where that makes a difference."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        self.mirror.publish(path)

    def stored_keys(self) -> set[str]:
        return {one.name for one in self.store.artifacts()}


@pytest.fixture(params=["folder", "s3"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Site:
    location = str(tmp_path / "store")
    if request.param == "s3":
        location = f"s3://{request.getfixturevalue('bucket')}/p"
    store = open_store(location, cache=tmp_path / "cache")
    folder = tmp_path / "GRPOFlow" / "1"
    folder.mkdir(parents=True)
    mirror = RunMirror(store, run_id="GRPOFlow/1", folder=folder)
    mirror.register()
    return Site(store=store, mirror=mirror, folder=folder)


@pytest.fixture
def days_later(monkeypatch: pytest.MonkeyPatch) -> Later:
    """The plan that somebody makes in some days, with a grace period of one."""

    def later(store: ArtifactStore, days: float, *forgotten: str) -> GarbagePlan:
        now = time.time()
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: now + days * DAY)
            return plan(store, grace_s=DAY, forgotten=forgotten)

    return later


def names(things: Any) -> set[str]:
    return {one.name for one in things}


def line(ref: StoreRef, **more: Any) -> str:
    return json.dumps({**more, **ref.to_dict()}) + "\n"


def test_whatever_a_runs_files_mention_stays(site: Site, days_later: Later) -> None:
    kept = [site.put(text) for text in ("rollouts", "lost", "probe", "manifest", "pinned")]
    site.write("rollouts.jsonl", line(kept[0], step=1))
    site.write("lost/rollouts-1.jsonl", line(kept[1], step=2) + '{"step": 3, "key": "half a li')
    site.write("evaluation.json", json.dumps({"probe_rollouts": kept[2].to_dict(), "more": [{"deep": []}]}, indent=2))
    site.write("checkpoints/step-000001/manifest.json", json.dumps({"files": {"rank0": kept[3].key}}))
    site.mirror.refer("scores", kept[4])
    garbage = site.put("nobody's")
    found = days_later(site.store, 3)
    assert names(found.garbage) == {garbage.key}
    assert {ref.key for ref in kept} <= names(found.referred)
    assert remove(site.store, found) == list(found.garbage)
    assert garbage.key not in site.stored_keys()
    for ref in kept:
        site.store.verify(ref)


def test_a_run_at_work_keeps_what_it_has_not_written_down_yet(site: Site, days_later: Later) -> None:
    """It was registered days ago and wrote something today; its newest artifacts are in no file yet."""
    new = site.put("rollouts of a step under way")
    assert names(days_later(site.store, 0.5).garbage) == set()
    assert new.key in names(days_later(site.store, 0.5).young)
    assert days_later(site.store, 0.5).live == ("GRPOFlow/1",)
    assert names(days_later(site.store, 3).garbage) == {new.key}, "days after its last sign of life"


def test_a_live_run_protects_everything_since_it_began(tmp_path: Path, days_later: Later) -> None:
    """On a folder, where times can be set: an artifact older than the grace period, of a run older still."""
    store = open_store(str(tmp_path / "store"))
    folder = tmp_path / "run"
    folder.mkdir()
    mirror = RunMirror(store, run_id="GRPOFlow/1", folder=folder)
    mirror.register()
    (tmp_path / "source").write_text("of its first step")
    ref = store.put_file(tmp_path / "source")
    (folder / "running.json").write_text("{}")
    now = time.time()
    os.utime(folder / "running.json", (now + 10 * DAY, now + 10 * DAY))
    found = days_later(store, 10)
    assert found.live == ("GRPOFlow/1",)
    assert names(found.young) == {ref.key}


def test_what_is_stored_again_between_plan_and_removal_stays(tmp_path: Path, days_later: Later) -> None:
    store = open_store(str(tmp_path / "store"))
    (tmp_path / "source").write_text("text")
    ref = store.put_file(tmp_path / "source")
    found = days_later(store, 3)
    assert names(found.garbage) == {ref.key}
    now = time.time()
    os.utime(store.get(ref), (now + 3 * DAY, now + 3 * DAY))  # what storing it again does
    assert remove(store, found) == []
    store.verify(ref)


def test_what_is_stored_again_while_others_are_removed_stays(
    tmp_path: Path, days_later: Later, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(str(tmp_path / "store"))
    refs = {}
    for text in ("one", "two"):
        (tmp_path / text).write_text(text)
        ref = store.put_file(tmp_path / text)
        refs[ref.key] = ref
    found = days_later(store, 3)
    first, second = found.garbage
    removed = store.remove

    def then_stored_again(key: str) -> None:
        removed(key)
        now = time.time()
        os.utime(store.get(refs[second.name]), (now + 3 * DAY, now + 3 * DAY))

    monkeypatch.setattr(store, "remove", then_stored_again)
    assert remove(store, found) == [first]
    store.verify(refs[second.name])


def test_when_an_artifact_was_stored(site: Site) -> None:
    ref = site.put("text")
    assert site.store.modified(ref.key) == pytest.approx(
        next(one.modified for one in site.store.artifacts() if one.name == ref.key), abs=1.0
    )
    assert site.store.modified("0" * 64) is None


def test_a_run_that_may_be_at_work_is_not_given_up(site: Site, days_later: Later) -> None:
    with pytest.raises(StorageError, match=r"GRPOFlow/1 wrote something within the last 24 hours and may be at work"):
        days_later(site.store, 0.5, "GRPOFlow/1")
    assert days_later(site.store, 3, "GRPOFlow/1").runs == ()


def test_a_store_behind_a_link_finds_its_runs(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "GRPOFlow" / "1"
    folder.mkdir(parents=True)
    (tmp_path / "large" / "disk").mkdir(parents=True)
    (tmp_path / "runs" / "store").symlink_to(tmp_path / "large" / "disk")
    store = open_store(str(tmp_path / "runs" / "store"))
    RunMirror(store, run_id="GRPOFlow/1", folder=folder).register()
    (run,) = known_runs(store)
    assert (run.folder, run.folder_is_missing) == (folder, False)
    plan(store, grace_s=DAY)


def test_references_are_not_read_from_a_damaged_cache(bucket: str, tmp_path: Path, days_later: Later) -> None:
    store = open_store(f"s3://{bucket}/p", cache=tmp_path / "cache")
    folder = tmp_path / "GRPOFlow" / "1"
    folder.mkdir(parents=True)
    mirror = RunMirror(store, run_id="GRPOFlow/1", folder=folder)
    site = Site(store=store, mirror=mirror, folder=folder)
    mirror.register()
    kept = site.put("rollouts")
    site.write("rollouts.jsonl", line(kept, step=1))
    (listed,) = mirror.files(folder / "rollouts.jsonl")
    cached = store.get(listed.ref)
    cached.chmod(0o644)
    cached.write_bytes(bytes(listed.ref.size_bytes))
    assert names(days_later(store, 3).garbage) == set()


def test_a_run_that_removes_files_while_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file goes between the look and the reading, and a whole folder between its name and its files."""
    store = open_store(str(tmp_path / "store"))
    folder = tmp_path / "GRPOFlow" / "1"
    checkpoints = [folder / "checkpoints" / f"step-{step}" for step in (1, 2, 3)]
    for number, checkpoint in enumerate(checkpoints):
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text(json.dumps({"rank0": str(number) * 64}))
    RunMirror(store, run_id="GRPOFlow/1", folder=folder).register()
    (run,) = known_runs(store)
    is_file = Path.is_file

    def then_pruned(path: Path) -> bool:
        found = is_file(path)
        if path.parent == checkpoints[0]:
            for checkpoint in checkpoints[:2]:
                shutil.rmtree(checkpoint)
        return found

    monkeypatch.setattr(Path, "is_file", then_pruned)
    assert references(store, run).keys == {"2" * 64}


def test_a_folder_that_cannot_be_read_is_no_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(str(tmp_path / "store"))
    folder = tmp_path / "GRPOFlow" / "1"
    folder.mkdir(parents=True)
    RunMirror(store, run_id="GRPOFlow/1", folder=folder).register()
    (run,) = known_runs(store)

    def forbidden(path: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", forbidden)
    with pytest.raises(StorageError, match=r"GRPOFlow/1 cannot be read \(Permission denied\), so what a run refers to"):
        references(store, run)


def test_a_run_whose_folder_is_missing_stops_everything(tmp_path: Path, days_later: Later) -> None:
    store = open_store(str(tmp_path / "store"))
    folder = tmp_path / "GRPOFlow" / "1"
    folder.mkdir(parents=True)
    RunMirror(store, run_id="GRPOFlow/1", folder=folder).register()
    shutil.rmtree(folder)
    with pytest.raises(StorageError, match=r"folders are missing: GRPOFlow/1; .* gc --forget GRPOFlow/1"):
        plan(store, grace_s=DAY)
    assert days_later(store, 3, "GRPOFlow/1").runs == ()
    forget(store, "GRPOFlow/1")
    assert known_runs(store) == []
    with pytest.raises(StorageError, match="knows no run 'GRPOFlow/1'"):
        forget(store, "GRPOFlow/1")


def test_a_storage_root_that_moved_as_a_whole_still_finds_its_runs(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "GRPOFlow" / "1").mkdir(parents=True)
    RunMirror(open_store(str(root / "store")), run_id="GRPOFlow/1", folder=root / "GRPOFlow" / "1").register()
    root.rename(tmp_path / "moved")
    (run,) = known_runs(open_store(str(tmp_path / "moved" / "store")))
    assert run.folder == tmp_path / "moved" / "GRPOFlow" / "1"


def test_what_only_a_forgotten_run_refers_to_is_garbage(site: Site, days_later: Later) -> None:
    ref = site.put("its rollouts")
    site.write("rollouts.jsonl", line(ref, step=1))
    assert names(days_later(site.store, 3).garbage) == set()
    forget(site.store, "GRPOFlow/1")
    assert ref.key in names(days_later(site.store, 3).garbage)


def test_scratch_of_writers_that_died_goes_too(tmp_path: Path, days_later: Later) -> None:
    store = open_store(str(tmp_path / "store"))
    (tmp_path / "store" / "incoming").mkdir(parents=True)
    (tmp_path / "store" / "incoming" / "half").write_text("ha")
    assert days_later(store, 0.5).unfinished == ()
    remove(store, days_later(store, 3))
    assert list((tmp_path / "store" / "incoming").iterdir()) == []


def test_verify_names_what_is_damaged_and_what_is_missing(site: Site, s3_admin: Any) -> None:
    good, damaged, missing = (site.put(text * 1000) for text in ("good", "damaged", "missing"))
    site.write("rollouts.jsonl", "".join(line(ref, step=step) for step, ref in enumerate((good, damaged, missing))))
    site.store.remove(missing.key)
    if site.store.is_remote:
        bucket = site.store.location.split("/")[2]
        name = f"p/objects/{damaged.key[:2]}/{damaged.key}"
        s3_admin.put_object(Bucket=bucket, Key=name, Body=b"?" * damaged.size_bytes)
    else:
        path = site.store.get(damaged)
        path.chmod(0o644)
        path.write_bytes(b"?" * damaged.size_bytes)
    (run,) = known_runs(site.store)
    refs = references(site.store, run).refs
    assert {good, damaged, missing} <= refs
    problems = {one.name: problem for one, problem in verify_all(site.store, refs, everything=True)}
    assert problems[good.key] is None
    assert "was damaged after storing" in (problems[damaged.key] or "")
    assert "not in the store" in (problems[missing.key] or "")
