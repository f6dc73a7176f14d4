"""Files of a replay: dumped states, read one tensor at a time, and trajectories, which another process may judge."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from grpo_lib.data.files import storage_errors
from grpo_lib.errors import DataError
from grpo_lib.parity.free_running import Split, Trajectory, TrajectoryStep
from grpo_lib.storage.local import LocalStore
from grpo_lib.storage.refs import StoreRef
from grpo_lib.storage.scores import read_scores, write_scores
from grpo_lib.types import StateKind

_RECORD = "trajectory.json"
_SETTING = "storage.root"


class StateFile:
    """`parity.replay.TensorReader` over one kind of a dumped state; the file stays memory-mapped while this lives.

    Raises:
        DataError: the file is missing or damaged.
    """

    def __init__(self, folder: Path, kind: StateKind) -> None:
        path = folder / f"{kind}.safetensors"
        try:
            self._file = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise DataError(f"{path} is not a dumped state: {error}") from error
        self.names: Sequence[str] = tuple(self._file.keys())

    def __call__(self, name: str) -> torch.Tensor:
        return self._file.get_tensor(name)


def write_trajectory(folder: Path, trajectory: Trajectory) -> None:
    """What `free_running` returned, beside the weights that it left below the same folder."""
    steps = []
    for step in trajectory.steps:
        scores = write_scores(LocalStore(folder), step.logprobs)
        plain = {name: getattr(step, name) for name in step.__slots__}
        steps.append({**plain, "logprobs": scores.to_dict(), "weights": str(step.weights.relative_to(folder))})
    record = {"name": trajectory.name, "split": trajectory.split, "steps": steps}
    with storage_errors(folder / _RECORD, setting=_SETTING):
        (folder / _RECORD).write_text(json.dumps(record) + "\n", encoding="utf-8")


def read_trajectory(folder: Path) -> Trajectory:
    """The inverse of `write_trajectory`.

    Raises:
        DataError: it is missing or damaged.
        StorageError: the scores beside it are.
    """
    store = LocalStore(folder)
    try:
        record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
        return Trajectory(
            name=record["name"],
            split=Split(record["split"]),
            steps=tuple(
                TrajectoryStep(
                    **{
                        **step,
                        "logprobs": read_scores(store, StoreRef.from_dict(step["logprobs"])),
                        "weights": folder / step["weights"],
                    }
                )
                for step in record["steps"]
            ),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder} holds no trajectory: {error}; measure again") from error
