"""The tensors of a DeepSpeed trainer's checkpoint: each rank writes the parts it owns, any ranks read them back.

DeepSpeed's own format is bound to the number of ranks and the ZeRO stage until a tool converts it. Here every file says
which elements of which tensor it holds, so that a rank of any layout reads what overlaps its own parts.

``state/rank<r>.safetensors``   ``"<kind>/<Hugging Face name>"`` → [n] fp32; starts and full shapes in the header
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from grpo_lib.data.files import no_room
from grpo_lib.errors import DataError, StorageError
from grpo_lib.trainers.checkpoint_folder import SETTING, CheckpointFacts, check_shapes, load_folder, save_folder
from grpo_lib.trainers.hf_deepspeed_state import Part, load_part
from grpo_lib.types import StateKind

Parts = Mapping[tuple[StateKind, str], Part]
Shapes = Mapping[str, tuple[int, ...]]


def save_checkpoint(path: Path, *, parts: Parts, shapes: Shapes, policy_version: int) -> None:
    """Collective; complete on disk when it returns on every rank. `parts` of all ranks cover each tensor once.

    Raises:
        DataError: the folder already holds a checkpoint.
        StorageError: it cannot be written; every rank raises when the state of one of them cannot.
    """

    def write(state: Path) -> None:
        failure = _write(state, parts, shapes)
        failures: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(failures, failure)
        causes = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(failures) if text)
        if causes:
            raise StorageError(no_room(path, causes, setting=SETTING))

    save_folder(path, write, policy_version=policy_version)


def load_checkpoint(path: Path, *, parts: Parts, shapes: Shapes) -> int:
    """Collective; fills the parts in place and returns the policy version.

    Raises:
        DataError: the checkpoint is incomplete or belongs to another model; the message names file or tensor.
    """

    def read(state: Path, facts: CheckpointFacts) -> None:
        with ExitStack() as stack:
            try:
                files = [
                    stack.enter_context(safe_open(_file(state, rank), framework="pt"))
                    for rank in range(facts.num_ranks)
                ]
                pieces = _pieces(state, files, parts, shapes)
                for key, part in parts.items():
                    load_part(part, lambda start, stop, key=key: _read(pieces[key], start, stop))
            except (SafetensorError, OSError) as error:
                raise DataError(f"{state} cannot be read: {error}; use an earlier checkpoint") from error

    return load_folder(path, read)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Elements [start, stop) of a flattened tensor, in a file."""

    start: int
    stop: int
    key: str
    file: Any


def _file(state: Path, rank: int) -> Path:
    return state / f"rank{rank}.safetensors"


def _write(state: Path, parts: Parts, shapes: Shapes) -> str | None:
    """This rank's file; the reason if it cannot be written."""
    header = {
        "starts": json.dumps({f"{kind}/{name}": part.start for (kind, name), part in parts.items()}),
        "shapes": json.dumps(shapes),
    }
    tensors = {f"{kind}/{name}": part.values.cpu().contiguous() for (kind, name), part in parts.items()}
    try:
        state.mkdir(parents=True, exist_ok=True)
        save_file(tensors, _file(state, dist.get_rank()), metadata=header)
    except (SafetensorError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _pieces(state: Path, files: list[Any], parts: Parts, shapes: Shapes) -> dict[tuple[StateKind, str], list[_Piece]]:
    """What the files hold of each wanted tensor, in order and without a gap; checked before anything is overwritten."""
    saved_shapes = {name: tuple(shape) for name, shape in json.loads(files[0].metadata()["shapes"]).items()}
    check_shapes(state, saved_shapes, dict(shapes))
    starts = [json.loads(file.metadata()["starts"]) for file in files]
    pieces = {}
    for kind, name in parts:
        key = f"{kind}/{name}"
        if key not in starts[0]:
            raise DataError(f"{state} holds no {kind}: it was saved by a frozen model and cannot be trained on")
        found = []
        for file, start in zip(files, starts, strict=True):
            numel = file.get_slice(key).get_shape()[0]
            if numel:
                found.append(_Piece(start=start[key], stop=start[key] + numel, key=key, file=file))
        found.sort(key=lambda piece: piece.start)
        bounds = [0, *(piece.stop for piece in found)]
        if [piece.start for piece in found] != bounds[:-1] or bounds[-1] != math.prod(shapes[name]):
            raise DataError(
                f"{state}: the files of {len(files)} ranks do not add up to {key!r}; use an earlier checkpoint"
            )
        pieces[kind, name] = found
    return pieces


def _read(pieces: list[_Piece], start: int, stop: int) -> torch.Tensor:
    """Elements [start, stop) of a flattened tensor."""
    overlapping = [piece for piece in pieces if piece.start < stop and start < piece.stop]
    return torch.cat(
        [
            piece.file.get_slice(piece.key)[max(start, piece.start) - piece.start : min(stop, piece.stop) - piece.start]
            for piece in overlapping
        ]
    )
