"""`grpo store gc` and `verify`: on a folder and on S3, nothing that a run refers to is ever removed."""

from __future__ import annotations

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
def days_later(monkeypatch: pytest.MonkeyPatch) -> Callable[[ArtifactStore, float], GarbagePlan]:
    """The plan that somebody makes in some days, with a grace period of one."""

    def later(store: ArtifactStore, days: float) -> GarbagePlan:
        now = time.time()
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: now + days * DAY)
            return plan(store, grace_s=DAY)

    return later


Later = Callable[[ArtifactStore, float], GarbagePlan]


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


def test_a_run_whose_folder_is_missing_stops_everything(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    folder = tmp_path / "GRPOFlow" / "1"
    folder.mkdir(parents=True)
    RunMirror(store, run_id="GRPOFlow/1", folder=folder).register()
    shutil.rmtree(folder)
    with pytest.raises(StorageError, match=r"folders are missing: GRPOFlow/1; .* gc --forget GRPOFlow/1"):
        plan(store, grace_s=DAY)
    assert plan(store, grace_s=DAY, forgotten=["GRPOFlow/1"]).runs == ()
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
