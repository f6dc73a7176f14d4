"""Folders are whole or absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_lib.data import files
from grpo_lib.data.files import scratches_of, whole_file, whole_folder
from grpo_lib.errors import StorageError


def test_a_folder_appears_with_all_its_files_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    monkeypatch.setattr(files, "fsync", lambda path: flushed.append(path.name))
    target = tmp_path / "run" / "model"
    with whole_folder(target, setting="storage.root") as scratch:
        (scratch / "sub").mkdir()
        (scratch / "sub" / "a").write_text("a")
        (scratch / "b").write_text("b")
        assert not target.exists()
    assert (target / "sub" / "a").read_text() == "a"
    assert sorted(flushed[:3]) == ["a", "b", "sub"]
    assert flushed[4:] == ["run"], "the new name itself"
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_a_failure_inside_is_passed_on_as_it_is_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="a deadline"):
        fill(tmp_path / "f", TimeoutError("a deadline"))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_in_it_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "old").touch()
    with pytest.raises(StorageError, match=r"cannot write .*/f: Directory not empty"):
        fill(tmp_path / "f")
    assert [path.name for path in tmp_path.rglob("*")] == ["f", "old"]


def fill(target: Path, failure: Exception | None = None) -> None:
    with whole_folder(target, setting="storage.root") as scratch:
        (scratch / "new").touch()
        if failure is not None:
            raise failure


def test_what_a_killed_process_leaves_is_found_again(tmp_path: Path) -> None:
    folder = whole_folder(tmp_path / "x[1]", setting="s")
    file = whole_file(tmp_path / "x[1]", setting="s")
    left = [folder.__enter__(), file.__enter__()]
    left[1].touch()
    assert sorted(scratches_of(tmp_path / "x[1]")) == sorted(left)
    assert scratches_of(tmp_path / "x") == []
