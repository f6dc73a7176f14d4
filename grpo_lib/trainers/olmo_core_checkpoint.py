"""Resumable checkpoints of the OLMo-core trainer: its distributed format for tensors, two small files beside it.

``<path>/state/``          OLMo-core's distributed checkpoint of model and optimiser, loadable by any number of ranks
``<path>/rng/rank<r>.pt``  PyTorch's generator states of each rank that saved
``<path>/trainer.json``    policy version and number of ranks
"""

from __future__ import annotations

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
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from grpo_lib.errors import DataError

_STATE, _RNG, _TRAINER = "state", "rng", "trainer.json"


def save_checkpoint(
    path: Path, *, model: Transformer, optimizer: torch.optim.Optimizer | None, policy_version: int
) -> None:
    """Collective; complete on disk when it returns on every rank.

    Raises:
        DataError: the folder already holds a checkpoint.
    """
    state = path / _STATE
    # Every rank looks before any rank writes, so that all of them raise or none does.
    is_taken = state.exists() and any(state.iterdir())
    dist.barrier()
    if is_taken:
        raise DataError(f"{path} already holds a checkpoint; checkpoints are never overwritten, choose another folder")
    save_model_and_optim_state(state, model, optimizer)
    rng = path / _RNG
    rng.mkdir(parents=True, exist_ok=True)
    torch.save(_rng_states(), rng / f"rank{dist.get_rank()}.pt")
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
    load_model_and_optim_state(path / _STATE, model, optimizer)
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
