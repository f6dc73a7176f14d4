"""The thread that writes snapshots: one at a time, behind the training, and out of its way."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from grpo_lib.errors import StorageError
from grpo_lib.trainers.checkpoint_folder import WriteBehind
from grpo_lib.types import WrittenFile


class Noted:
    """A snapshot that notes which thread wrote it and at which priority, once it may."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.go_on = threading.Event()
        self.failure = failure

    def write(self, path: Path) -> WrittenFile:
        self.go_on.wait()
        if self.failure is not None:
            raise self.failure
        niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        return WrittenFile(name=f"{threading.current_thread().name} {niceness}", size_bytes=0, sha256="0" * 64)


def test_it_is_told_when_the_file_is_there() -> None:
    writer, snapshot = WriteBehind(), Noted()
    writer.begin(Path("x"), lambda: snapshot)
    assert writer.written(wait=False) is None
    snapshot.go_on.set()
    file = writer.written(wait=True)
    assert file is not None
    assert file.name.startswith("checkpoint")
    assert writer.written(wait=False) == file
    writer.close()


def test_the_next_snapshot_is_taken_after_the_file_before_it() -> None:
    """It is copied to the same memory."""
    writer, first, second = WriteBehind(), Noted(), Noted()
    second.go_on.set()
    writer.begin(Path("x"), lambda: first)
    taken: list[bool] = []

    def take() -> Noted:
        taken.append(first.go_on.is_set() and writer.written(wait=False) is not None)
        return second

    threading.Timer(0.05, first.go_on.set).start()
    writer.begin(Path("y"), take)
    assert taken == [True]
    writer.close()


def test_a_failure_is_told_and_the_next_file_is_written() -> None:
    writer, broken, whole = WriteBehind(), Noted(StorageError("cannot write x")), Noted()
    for snapshot in (broken, whole):
        snapshot.go_on.set()
    writer.begin(Path("x"), lambda: broken)
    with pytest.raises(StorageError, match="cannot write x"):
        writer.written(wait=True)
    writer.begin(Path("y"), lambda: whole)
    assert writer.written(wait=True) is not None
    writer.close()


def test_training_comes_first() -> None:
    writer, snapshot = WriteBehind(), Noted()
    snapshot.go_on.set()
    before = os.getpriority(os.PRIO_PROCESS, 0)
    writer.begin(Path("x"), lambda: snapshot)
    file = writer.written(wait=True)
    assert file is not None
    assert int(file.name.split()[-1]) == min(before + 15, 19)
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
    writer.close()
