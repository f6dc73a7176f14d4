"""What every trainer's checkpoint has beside its tensors, and in which order it is written and read.

``<path>/state/``          the backend's tensors, in its own format
``<path>/rng/rank<r>.pt``  PyTorch's generator states of each rank that saved
``<path>/trainer.json``    policy version and number of ranks; written last
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from grpo_lib.data.files import storage_errors
from grpo_lib.errors import DataError

SETTING = "storage.root"
_STATE, _RNG, _TRAINER = "state", "rng", "trainer.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """Content of ``trainer.json``."""

    policy_version: int
    num_ranks: int  # that saved


def save_folder(path: Path, write_state: Callable[[Path], None], *, policy_version: int) -> None:
    """Collective; complete on disk when it returns on every rank.

    Args:
        write_state: Writes this rank's share of the tensors below the folder it is given. It raises `StorageError` on
            every rank when it fails on one.

    Raises:
        DataError: the folder already holds a checkpoint.
        StorageError: it cannot be written.
    """
    state = path / _STATE
    # Every rank looks before any rank writes, so that all of them raise or none does.
    is_taken = state.exists() and any(state.iterdir())
    dist.barrier()
    if is_taken:
        raise DataError(f"{path} already holds a checkpoint; checkpoints are never overwritten, choose another folder")
    with storage_errors(path, setting=SETTING):
        write_state(state)
        rng = path / _RNG
        rng.mkdir(parents=True, exist_ok=True)
        states = io.BytesIO()  # PyTorch's own writer reports a full disk as a bare RuntimeError
        torch.save(_rng_states(), states)
        (rng / f"rank{dist.get_rank()}.pt").write_bytes(states.getvalue())
        if dist.get_rank() == 0:
            about = {"policy_version": policy_version, "num_ranks": dist.get_world_size()}
            (path / _TRAINER).write_text(json.dumps(about, indent=2) + "\n")
    dist.barrier()


def load_folder(path: Path, read_state: Callable[[Path, CheckpointFacts], None]) -> int:
    """Collective; returns the policy version.

    Args:
        read_state: Fills the trainer in place, or raises `DataError` before it has changed anything.

    Raises:
        DataError: the checkpoint is incomplete or belongs to another model; the message names file or tensor.
    """
    facts = _read_facts(path / _TRAINER)
    read_state(path / _STATE, facts)
    # With more ranks than saved, the surplus ones share a generator state with an earlier rank. Nothing the trainer
    # computes draws random numbers, so this only keeps their states defined.
    rng = path / _RNG / f"rank{dist.get_rank() % facts.num_ranks}.pt"
    if not rng.is_file():
        raise DataError(f"{rng} is missing: the checkpoint is incomplete")
    _set_rng_states(torch.load(rng, weights_only=True))
    return facts.policy_version


def check_shapes(state: Path, saved: dict[str, tuple[int, ...]], own: dict[str, tuple[int, ...]]) -> None:
    """Raise unless a checkpoint holds the model's tensors in its shapes.

    Raises:
        DataError: names the first tensor that differs.
    """
    for name in sorted(saved.keys() | own.keys()):
        if saved.get(name) != own.get(name):
            raise DataError(
                f"{state}: tensor {name!r} has shape {saved.get(name, 'none')} in the checkpoint and "
                f"{own.get(name, 'none')} in the model; it was saved by a run of another model"
            )


def _read_facts(file: Path) -> CheckpointFacts:
    try:
        about = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise DataError(f"{file} is missing: {file.parent} is not a complete trainer checkpoint") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{file} is not valid JSON: {error}") from error
    return CheckpointFacts(policy_version=int(about["policy_version"]), num_ranks=int(about["num_ranks"]))


def _rng_states() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_rng_states(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
