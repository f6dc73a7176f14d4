"""The tensors of an OLMo-core trainer's checkpoint: its own distributed format, loadable by any number of ranks."""

from __future__ import annotations

from pathlib import Path

import torch
from olmo_core.distributed.checkpoint import (
    get_checkpoint_metadata,
    load_model_and_optim_state,
    save_model_and_optim_state,
)
from olmo_core.nn.transformer import Transformer
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from grpo_lib.data.files import no_room
from grpo_lib.errors import DataError, StorageError
from grpo_lib.trainers.checkpoint_folder import SETTING, CheckpointFacts, check_shapes, load_folder, save_folder


def save_checkpoint(
    path: Path, *, model: Transformer, optimizer: torch.optim.Optimizer | None, policy_version: int
) -> None:
    """Collective; complete on disk when it returns on every rank.

    Raises:
        DataError: the folder already holds a checkpoint.
        StorageError: it cannot be written; every rank raises when the state of one of them cannot.
    """

    def write(state: Path) -> None:
        try:
            save_model_and_optim_state(state, model, optimizer)
        except CheckpointException as error:
            raise StorageError(no_room(path, _causes(error), setting=SETTING)) from error

    save_folder(path, write, policy_version=policy_version)


def load_checkpoint(path: Path, *, model: Transformer, optimizer: torch.optim.Optimizer | None) -> int:
    """Collective; fills model and optimiser in place and returns the policy version.

    Raises:
        DataError: the checkpoint is incomplete or belongs to another model; the message names file or tensor.
    """

    def read(state: Path, facts: CheckpointFacts) -> None:
        _check_state(state, model, optimizer)
        try:
            load_model_and_optim_state(state, model, optimizer)
        except CheckpointException as error:
            raise DataError(f"{state} cannot be read: {_causes(error)}; use an earlier checkpoint") from error

    return load_folder(path, read)


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
    check_shapes(state, saved, own)
    if optimizer is not None and not any(key.startswith("optim.") for key in entries):
        raise DataError(f"{state} holds no optimiser state: it was saved by a frozen model and cannot be trained on")


def _causes(error: CheckpointException) -> str:
    """The last line of each failed rank's error. PyTorch collects them in a `BaseException`, which no handler of
    errors catches: it would end the rank's process without a word."""
    lines = {rank: str(cause).strip() or type(cause).__name__ for rank, (cause, _) in error.failures.items()}
    return "; ".join(f"rank {rank}: {text.splitlines()[-1]}" for rank, text in lines.items())
