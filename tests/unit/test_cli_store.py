"""`grpo store`: lists, verifies, cleans and reads a store, and says what to do."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from grpo_lib.cli import main
from grpo_lib.storage.locations import open_store
from grpo_lib.storage.mirror import RunMirror
from grpo_lib.storage.refs import StoreRef

DAY = 86_400


class Filled:
    """A store with a run that ended two days ago, an artifact of it, and one of nobody."""

    def __init__(self, location: str, tmp_path: Path) -> None:
        self.location, self.tmp_path = location, tmp_path
        self.store = open_store(location)
        self.folder = tmp_path / "GRPOFlow" / "1"
        self.folder.mkdir(parents=True)
        self.mirror = RunMirror(self.store, run_id="GRPOFlow/1", folder=self.folder)
        self.mirror.register()
        self.kept, self.garbage = self.put("of the run"), self.put("of nobody")
        (self.folder / "rollouts.jsonl").write_text(json.dumps({"step": 1, **self.kept.to_dict()}) + "\n")
        self.mirror.publish(self.folder / "rollouts.jsonl")

    def put(self, text: str) -> StoreRef:
        (self.tmp_path / "source").write_text(text)
        return self.store.put_file(self.tmp_path / "source")

    def age(self) -> None:
        """As if all of it had been written two days ago."""
        before = time.time() - 2 * DAY
        for path in (*(self.tmp_path / "store").rglob("*"), *self.folder.rglob("*")):
            os.utime(path, (before, before))


@pytest.fixture
def filled(tmp_path: Path) -> Filled:
    return Filled(str(tmp_path / "store"), tmp_path)


def run(*arguments: str, capsys: Any) -> tuple[int, str, str]:
    code = main(["store", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_ls(filled: Filled, capsys: Any) -> None:
    code, out, _ = run("ls", "--store", filled.location, "--artifacts", capsys=capsys)
    assert code == 0
    assert out.startswith("GRPOFlow/1  ")
    assert str(filled.folder) in out
    assert f"{filled.kept.key}               10  " in out
    assert out.endswith(f"{filled.location}: 2 artifacts, 0.0 MiB\n")


def test_gc_shows_first_and_removes_on_demand(filled: Filled, capsys: Any) -> None:
    code, out, _ = run("gc", "--store", filled.location, capsys=capsys)
    assert code == 0
    assert "garbage       0 artifacts" in out, "just written"
    filled.age()
    code, out, _ = run("gc", "--store", filled.location, capsys=capsys)
    assert out.startswith(f"garbage  {filled.garbage.key}")
    assert "nothing was removed; --delete does it" in out
    filled.store.verify(filled.garbage)
    code, out, _ = run("gc", "--store", filled.location, "--delete", capsys=capsys)
    assert (code, out.splitlines()[-1]) == (0, "removed 1 artifacts, 0.0 MiB")
    assert [one.name for one in filled.store.artifacts()] == [filled.kept.key]


def test_gc_gives_a_run_up_only_by_name(filled: Filled, capsys: Any) -> None:
    filled.age()
    code, _, err = run("gc", "--store", filled.location, "--forget", "GRPOFlow/2", "--delete", capsys=capsys)
    assert code == 1
    assert "knows no run GRPOFlow/2" in err
    run("gc", "--store", filled.location, "--forget", "GRPOFlow/1", "--delete", capsys=capsys)
    assert list(filled.store.artifacts()) == []


def test_gc_refuses_a_grace_period_that_protects_nobody(filled: Filled, capsys: Any) -> None:
    code, _, err = run("gc", "--store", filled.location, "--grace-hours", "0", "--delete", capsys=capsys)
    assert code == 2
    assert "--grace-hours (0) must be at least 1" in err


def test_verify(filled: Filled, capsys: Any) -> None:
    code, out, _ = run("verify", "--store", filled.location, capsys=capsys)
    assert (code, out) == (
        0,
        f"{filled.location}: 2 artifacts whole, 0 damaged or missing; 1 runs refer to 1\n",
    )
    filled.store.remove(filled.kept.key)
    code, out, _ = run("verify", "--store", filled.location, "--run", "GRPOFlow/1", capsys=capsys)
    assert code == 1
    assert out.startswith(f"BAD   {filled.kept.key}  artifact {filled.kept.key} is not in the store")


def test_get_an_artifact_by_the_beginning_of_its_key(filled: Filled, tmp_path: Path, capsys: Any) -> None:
    out_file = tmp_path / "out"
    code, _, _ = run("get", "--store", filled.location, filled.kept.key[:8], str(out_file), capsys=capsys)
    assert code == 0
    assert out_file.read_text() == "of the run"
    code, _, err = run("get", "--store", filled.location, filled.kept.key[:8], str(out_file), capsys=capsys)
    assert code == 1
    assert "exists; name a new one" in err
    code, _, err = run("get", "--store", filled.location, "deadbeef", str(tmp_path / "o2"), capsys=capsys)
    assert code == 1
    assert "0 artifacts have a key that begins so" in err


def test_get_what_a_run_published(bucket: str, tmp_path: Path, capsys: Any) -> None:
    filled = Filled(f"s3://{bucket}/p", tmp_path)
    out = tmp_path / "elsewhere"
    code, printed, _ = run("get", "--store", filled.location, "GRPOFlow/1", str(out), capsys=capsys)
    assert (code, printed) == (0, f"{out}: rollouts.jsonl\n")
    assert (out / "rollouts.jsonl").read_text() == (filled.folder / "rollouts.jsonl").read_text()
    code, _, err = run("get", "--store", filled.location, "GRPOFlow/1/model", str(tmp_path / "m"), capsys=capsys)
    assert code == 1
    assert "did not publish 'GRPOFlow/1/model'; it published rollouts.jsonl" in err


def test_a_store_that_is_not_there(tmp_path: Path, capsys: Any) -> None:
    code, _, err = run("ls", "--store", str(tmp_path / "nowhere"), capsys=capsys)
    assert code == 1
    assert "is not a folder, so no store; name it with --store" in err
