"""Resumable checkpoints of the OLMo-core trainer: its distributed format for tensors, two small files beside it.

``<path>/state/``          OLMo-core's distributed checkpoint of model and optimiser, loadable by any number of ranks
``<path>/rng/rank<r>.pt``  PyTorch's generator states of each rank that saved
``<path>/trainer.json``    policy version and number of ranks
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import torch
import torch.distributed as dist
from olmo_core.distributed.checkpoint import (
    get_checkpoint_metadata,
    load_model_and_optim_state,
    save_model_and_optim_state,
)
from olmo_core.nn.transformer import Transformer
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from grpo_lib.data.files import no_room, storage_errors
from grpo_lib.errors import DataError, StorageError

_STATE, _RNG, _TRAINER = "state", "rng", "trainer.json"
_SETTING = "storage.root"


def save_checkpoint(
    path: Path, *, model: Transformer, optimizer: torch.optim.Optimizer | None, policy_version: int
) -> None:
    """Collective; complete on disk when it returns on every rank.

    Raises:
        DataError: the folder already holds a checkpoint.
        StorageError: it cannot be written; every rank raises when the state of one of them cannot.
    """
    state = path / _STATE
    # Every rank looks before any rank writes, so that all of them raise or none does.
    is_taken = state.exists() and any(state.iterdir())
    dist.barrier()
    if is_taken:
        raise DataError(f"{path} already holds a checkpoint; checkpoints are never overwritten, choose another folder")
    with storage_errors(path, setting=_SETTING):
        try:
            save_model_and_optim_state(state, model, optimizer)
        except CheckpointException as error:
            raise StorageError(no_room(path, _causes(error), setting=_SETTING)) from error
        rng = path / _RNG
        rng.mkdir(parents=True, exist_ok=True)
        states = io.BytesIO()  # PyTorch's own writer reports a full disk as a bare RuntimeError
        torch.save(_rng_states(), states)
        (rng / f"rank{dist.get_rank()}.pt").write_bytes(states.getvalue())
        if dist.get_rank() == 0:
            about = {"policy_version": policy_version, "num_ranks": dist.get_world_size()}
            (path / _TRAINER).write_text(json.dumps(about, indent=2) + "\n")
    dist.barrier()


def load_checkpoint(path: Path, *, model: Transformer, optimizer: torch.optim.Optimizer | None) -> int:
    """Collective; fills model and optimiser in place and returns the policy version.

    Raises:
        DataError: the checkpoint is incomplete or belongs to another model; the message names file or tensor.
    """
    about = _read_about(path / _TRAINER)
    _check_state(path / _STATE, model, optimizer)
    try:
        load_model_and_optim_state(path / _STATE, model, optimizer)
    except CheckpointException as error:
        raise DataError(f"{path / _STATE} cannot be read: {_causes(error)}; use an earlier checkpoint") from error
    # With more ranks than saved, the surplus ones share a generator state with an earlier rank. Nothing the trainer
    # computes draws random numbers, so this only keeps their states defined.
    rng = path / _RNG / f"rank{dist.get_rank() % about['num_ranks']}.pt"
    if not rng.is_file():
        raise DataError(f"{rng} is missing: the checkpoint is incomplete")
    _set_rng_states(torch.load(rng, weights_only=True))
    return about["policy_version"]


def _check_state(state: Path, model: Transformer, optimizer: torch.optim.Optimizer | None) -> None:
    """Names and shapes, before anything is overwritten; PyTorch's loader would skip what only the file has."""
    try:
        entries = get_checkpoint_metadata(state).state_dict_metadata
    except FileNotFoundError as error:
        raise DataError(f"{state} has no .metadata file: the checkpoint is incomplete or was never written") from error
    saved = {
        key.removeprefix("model."): tuple(entry.size)
        for key, entry in entries.items()
        if key.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in sorted(saved.keys() | own.keys()):
        if saved.get(name) != own.get(name):
            raise DataError(
                f"{state}: tensor {name!r} has shape {saved.get(name, 'none')} in the checkpoint and "
                f"{own.get(name, 'none')} in the model; it was saved by a run of another model"
            )
    if optimizer is not None and not any(key.startswith("optim.") for key in entries):
        raise DataError(f"{state} holds no optimiser state: it was saved by a frozen model and cannot be trained on")


def _causes(error: CheckpointException) -> str:
    """The last line of each failed rank's error. PyTorch collects them in a `BaseException`, which no handler of
    errors catches: it would end the rank's process without a word."""
    lines = {rank: str(cause).strip() or type(cause).__name__ for rank, (cause, _) in error.failures.items()}
    return "; ".join(f"rank {rank}: {text.splitlines()[-1]}" for rank, text in lines.items())


def _read_about(file: Path) -> dict[str, int]:
    try:
        about = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise DataError(f"{file} is missing: {file.parent} is not a complete trainer checkpoint") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{file} is not valid JSON: {error}") from error
    return {key: int(about[key]) for key in ("policy_version", "num_ranks")}


def _rng_states() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_rng_states(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
