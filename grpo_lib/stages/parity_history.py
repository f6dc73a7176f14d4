"""The history of the nightly gate: one line of JSON a night in `<storage.root>/parity-history.jsonl`."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from grpo_lib.config import RunConfig
from grpo_lib.data.files import storage_errors
from grpo_lib.parity.history import Night, NightlyCheck, comparable, drift_lines, drift_rows, drifts
from grpo_lib.types import ParityVerdict

FILE = "parity-history.jsonl"
_NIGHT = TypeAdapter(Night)
_SETTING = "storage.root"
# Sections and settings that decide where a gate runs and how it judges, but not what it computes.
_NOT_WORKLOAD = ("seed", "deadlines", "storage", "tracking", "parity")


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """All nights of a file in its order, and one message for each line that is not a night."""

    nights: tuple[Night, ...]
    damaged: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NightRecord:
    """Tonight against the nights before it, all plain data."""

    drift: list[dict[str, object]]  # rows of the report's `drift` table
    lines: list[str]  # for a terminal


def run(
    config: RunConfig,
    report: Mapping[str, Any],
    *,
    run_id: str,
    trainers: Sequence[str],
    lineage: Mapping[str, Any],
    seconds: Mapping[str, float],
) -> NightRecord:
    """Write tonight down, and hold it against the last `parity.history_nights` nights that measured the same.

    Args:
        report: `parity.report.to_dict`.
        lineage: Of the run, see `lineage.lineage`.
        seconds: By span.

    Raises:
        StorageError: the file cannot be written.
    """
    path = history_path(config)
    night = _night(config, report, run_id=run_id, trainers=trainers, lineage=lineage, seconds=seconds)
    append_night(path, night)
    history = read_history(path)
    found = drifts(night, comparable(night, history.nights, most=config.parity.history_nights))
    return NightRecord(drift=drift_rows(found), lines=[*drift_lines(found), *history.damaged])


def history_path(config: RunConfig) -> Path:
    """The one history file of a storage root."""
    return Path(os.path.abspath(config.storage.root)) / FILE


def append_night(path: Path, night: Night) -> None:
    """Add a line, which is on the disk when this returns. Two nights that end together wait for each other.

    A part of a line that a crash left at the end is closed first, so that it spoils no line but its own.

    Raises:
        StorageError: the file cannot be written.
    """
    with storage_errors(path, setting=_SETTING):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(size - 1)
            torn = size and file.read(1) != b"\n"
            file.write((b"\n" if torn else b"") + _NIGHT.dump_json(night) + b"\n")
            file.flush()
            os.fsync(file.fileno())


def read_history(path: Path) -> History:
    """Every night that can be read; a file that is not there yet is empty."""
    if not path.exists():
        return History(nights=(), damaged=())
    nights, damaged = [], []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            nights.append(_NIGHT.validate_json(line))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            reason = f"{where}: {first['msg']}" if where else first["msg"]
            damaged.append(f"{path}, line {number} is not a night and is left out ({reason}); delete that line")
    return History(nights=tuple(nights), damaged=tuple(damaged))


def _night(
    config: RunConfig,
    report: Mapping[str, Any],
    *,
    run_id: str,
    trainers: Sequence[str],
    lineage: Mapping[str, Any],
    seconds: Mapping[str, float],
) -> Night:
    return Night(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        run_id=run_id,
        recipe=config.recipe,
        model_sha256=lineage["model_sha256"],
        trainers=tuple(trainers),
        workload=_workload(config),
        commit=lineage["git"]["commit"] if lineage["git"] else None,
        packages=dict(lineage["packages"]),
        verdict=ParityVerdict(report["verdict"]),
        checks=tuple(
            NightlyCheck(
                name=check["name"],
                verdict=ParityVerdict(check["verdict"]),
                value=check["value"],
                tolerance=check["tolerance"],
            )
            for check in report["checks"]
        ),
        seconds=dict(seconds),
    )


def _workload(config: RunConfig) -> str:
    """Hash of what is computed: a night with a tighter tolerance or another seed belongs to the same series."""
    settings = config.model_dump(mode="json")
    computed = {name: value for name, value in settings.items() if name not in _NOT_WORKLOAD}
    computed["replay_steps"] = config.parity.replay_steps
    computed["trainer"].pop("backend")  # the night names its trainers
    return hashlib.sha256(json.dumps(computed, sort_keys=True).encode()).hexdigest()
