"""A trainer's checkpoint: each rank writes the parts of the state that it owns, ranks of any backend read them back.

The frameworks' own formats are bound to one of them, some also to a number of ranks or a ZeRO stage. Here every file
says which elements of which tensor it holds, so a rank of any layout reads what overlaps its own parts. No rank waits
for another one, so a checkpoint can be written while all of them compute on.

``<path>/rank<r>.safetensors``   ``"<kind>/<Hugging Face name>"`` → [n] fp32, ``"rng/<device>"`` → generator state;
                                 starts, full shapes, policy version and number of ranks in the header
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from grpo_lib.data.files import fsync, no_room, sha256_of, storage_errors
from grpo_lib.errors import DataError, StorageError
from grpo_lib.interfaces import StateSnapshot
from grpo_lib.trainers.state_parts import Part, load_part
from grpo_lib.types import StateKind, WrittenFile

_SETTING = "storage.root"
_NICENESS = 15  # a thirtieth of the time of a processor that training fills

Parts = Mapping[tuple[StateKind, str], Part]
Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """`StateSnapshot`: one rank's share of the state, in host memory that the next snapshot uses again."""

    rank: int
    tensors: Mapping[str, torch.Tensor]
    header: Mapping[str, str]

    def write(self, path: Path) -> WrittenFile:
        """Write this rank's file into an existing folder; it is on the disk when this returns.

        Raises:
            DataError: the folder already holds this rank's part of a checkpoint.
            StorageError: it cannot be written.
        """
        file = _file(path, self.rank)
        if file.exists():
            raise DataError(
                f"{path} already holds a checkpoint; checkpoints are never overwritten, choose another folder"
            )
        with storage_errors(path, setting=_SETTING):
            try:
                save_file(dict(self.tensors), file, metadata=dict(self.header))
            except SafetensorError as error:  # also what it makes of a full disk
                raise StorageError(no_room(path, str(error), setting=_SETTING)) from error
            fsync(file)
            return WrittenFile(name=file.name, size_bytes=file.stat().st_size, sha256=sha256_of(file))


class StateCopier:
    """Copies a rank's state to host memory that it keeps, pinned where there is a GPU: fresh pages cost more time than
    the copy, and a step waits for both."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_gpu,
                use_shared_memory=False,
                use_async_staging=False,  # the state may change as soon as it is copied, so nobody goes on before
                use_non_blocking_copy=on_gpu,
            )
        )

    def snapshot(self, parts: Parts, shapes: Shapes, *, policy_version: int) -> Snapshot:
        """The parts that this rank speaks for; those of all ranks cover each tensor exactly once. Overwrites the
        snapshot before this one."""
        tensors = {f"{kind}/{name}": part.values for (kind, name), part in parts.items()}
        header = {
            "starts": json.dumps({f"{kind}/{name}": part.start for (kind, name), part in parts.items()}),
            "shapes": json.dumps({name: list(shape) for name, shape in shapes.items()}),
            "policy_version": str(policy_version),
            "num_ranks": str(dist.get_world_size()),
        }
        copies: Any = self._stager.stage(tensors)
        return Snapshot(rank=dist.get_rank(), tensors={**copies, **_rng_states()}, header=header)


class WriteBehind:
    """Writes snapshots in a thread of its own, one at a time, with little claim to a processor that training wants."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint", initializer=_step_back)
        self._writing: Future[WrittenFile] | None = None

    def begin(self, path: Path, snapshot: Callable[[], StateSnapshot]) -> None:
        """Take a snapshot and begin to write it, once the one before is over, of which `written` told."""
        if self._writing is not None:
            wait_for([self._writing])
        self._writing = self._thread.submit(snapshot().write, path)

    def written(self, *, wait: bool) -> WrittenFile | None:
        """The file that was begun last; None while it is being written.

        Raises:
            DataError, StorageError: as `Snapshot.write`.
        """
        assert self._writing is not None, "begin comes first"
        return self._writing.result() if wait or self._writing.done() else None

    def close(self) -> None:
        """Wait for the file under way; nobody asked for it any more, so a failure is not raised."""
        self._thread.shutdown(wait=True)


def _step_back() -> None:
    """Lower the priority of the calling thread. Where training fills all processors, as on a CPU, it would otherwise
    lose as many seconds as the writing takes; so the writing takes longer."""
    if sys.platform == "linux":  # where threads have priorities of their own
        niceness = min(os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS, 19)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


def load_checkpoint(path: Path, *, parts: Parts, shapes: Shapes) -> int:
    """Fill the parts in place, restore the generators, and return the policy version.

    Raises:
        DataError: the checkpoint is incomplete or belongs to another model; the message names file or tensor, and
            nothing has been changed unless a file breaks off in the middle.
    """
    with ExitStack() as stack:
        try:
            files = _open_all(path, stack)
            pieces = _pieces(path, files, parts, shapes)
            rng = _own_rng(files)
            for key, part in parts.items():
                load_part(part, lambda start, stop, key=key: _read(pieces[key], start, stop))
        except (SafetensorError, OSError) as error:
            raise DataError(f"{path} cannot be read: {error}; use an earlier checkpoint") from error
        _set_rng_states(rng)
        return int(files[0].metadata()["policy_version"])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Elements [start, stop) of a flattened tensor, in a file."""

    start: int
    stop: int
    key: str
    file: Any


def _file(path: Path, rank: int) -> Path:
    return path / f"rank{rank}.safetensors"


def _open_all(path: Path, stack: ExitStack) -> list[Any]:
    """The files of all ranks that saved, by rank; they must be of one checkpoint."""
    if not _file(path, 0).is_file():
        raise DataError(f"{_file(path, 0)} is missing: {path} is not a complete trainer checkpoint")
    first = stack.enter_context(safe_open(_file(path, 0), framework="pt"))
    files = [first]
    for rank in range(1, int(first.metadata()["num_ranks"])):
        if not _file(path, rank).is_file():
            raise DataError(f"{_file(path, rank)} is missing: the checkpoint is incomplete")
        files.append(stack.enter_context(safe_open(_file(path, rank), framework="pt")))
    for rank, file in enumerate(files):
        for key in ("policy_version", "num_ranks", "shapes"):
            if file.metadata()[key] != first.metadata()[key]:
                raise DataError(
                    f"{_file(path, rank)} is of another checkpoint than rank 0's: its {key} is "
                    f"{file.metadata()[key]:.80}, not {first.metadata()[key]:.80}; use an earlier checkpoint"
                )
    return files


def _pieces(path: Path, files: list[Any], parts: Parts, shapes: Shapes) -> dict[tuple[StateKind, str], list[_Piece]]:
    """What the files hold of each wanted tensor, in order and without a gap; checked before anything is overwritten."""
    _check_shapes(path, json.loads(files[0].metadata()["shapes"]), shapes)
    starts = [json.loads(file.metadata()["starts"]) for file in files]
    pieces = {}
    for kind, name in parts:
        key = f"{kind}/{name}"
        if key not in starts[0]:
            raise DataError(f"{path} holds no {kind}: it was saved by a frozen model and cannot be trained on")
        found = []
        for file, start in zip(files, starts, strict=True):
            numel = file.get_slice(key).get_shape()[0]
            if numel:
                found.append(_Piece(start=start[key], stop=start[key] + numel, key=key, file=file))
        found.sort(key=lambda piece: piece.start)
        bounds = [0, *(piece.stop for piece in found)]
        if [piece.start for piece in found] != bounds[:-1] or bounds[-1] != math.prod(shapes[name]):
            raise DataError(
                f"{path}: the files of {len(files)} ranks do not add up to {key!r}; use an earlier checkpoint"
            )
        pieces[kind, name] = found
    return pieces


def _check_shapes(path: Path, saved: Shapes, own: Shapes) -> None:
    """Raise unless a checkpoint holds the model's tensors in its shapes."""
    for name in sorted(saved.keys() | own.keys()):
        there, here = (tuple(shapes[name]) if name in shapes else "none" for shapes in (saved, own))
        if there != here:
            raise DataError(
                f"{path}: tensor {name!r} has shape {there} in the checkpoint and {here} in the model; "
                "it was saved by a run of another model"
            )


def _read(pieces: list[_Piece], start: int, stop: int) -> torch.Tensor:
    """Elements [start, stop) of a flattened tensor."""
    overlapping = [piece for piece in pieces if piece.start < stop and start < piece.stop]
    return torch.cat(
        [
            piece.file.get_slice(piece.key)[max(start, piece.start) - piece.start : min(stop, piece.stop) - piece.start]
            for piece in overlapping
        ]
    )


def _own_rng(files: list[Any]) -> dict[str, torch.Tensor]:
    """This rank's generator states. With more ranks than saved, the surplus ones share a state with an earlier rank:
    nothing the trainer computes draws random numbers, so this only keeps their states defined."""
    file = files[dist.get_rank() % len(files)]
    return {key: file.get_tensor(key) for key in file.keys() if key.startswith("rng/")}  # noqa: SIM118 no mapping


def _rng_states() -> dict[str, torch.Tensor]:
    states = {"rng/cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["rng/cuda"] = torch.cuda.get_rng_state()
    return states


def _set_rng_states(states: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["rng/cpu"])
    if "rng/cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["rng/cuda"])
