"""What any backend can do that gives and takes full tensors by Hugging Face name. Everything here is collective."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from grpo_lib.algo.checksum import NamedChecksums
from grpo_lib.data.files import storage_errors, whole_folder
from grpo_lib.errors import DataError
from grpo_lib.interfaces import InspectableTrainer, TrainerBackend
from grpo_lib.trainers.hf_checkpoint import HfFolder, HfFolderWriter
from grpo_lib.types import TRAINING_STATE, Bucket, ShardedTensor, StateKind

_ABOUT = "state.json"
_SETTING = "storage.root"


def in_buckets(tensors: Iterable[tuple[str, torch.Tensor]], limit_bytes: int) -> Iterator[Bucket]:
    """Consecutive tensors in buckets of at most `limit_bytes`, or of one larger tensor."""
    pending: list[tuple[str, torch.Tensor]] = []
    num_bytes = 0
    for name, tensor in tensors:
        if pending and num_bytes + tensor.nbytes > limit_bytes:
            yield Bucket(tensors=tuple(pending))
            pending, num_bytes = [], 0
        pending.append((name, tensor))
        num_bytes += tensor.nbytes
    if pending:
        yield Bucket(tensors=tuple(pending))


def export_hf(trainer: TrainerBackend, path: Path, *, source: Path, dtype: str) -> None:
    """Rank 0 writes a folder that `transformers` and vLLM load; it is complete or absent.

    Args:
        source: The base model's folder, whose config and tokenizer go along.
        dtype: Name of the dtype that `named_weights` yields.

    Raises:
        StorageError: the folder cannot be written, or it holds something already.
    """
    manifest = trainer.manifest()
    with ExitStack() as stack:
        writer = None
        if dist.get_rank() == 0:
            scratch = stack.enter_context(whole_folder(path, setting=_SETTING))
            writer = HfFolderWriter(scratch, source=source, manifest=manifest, dtype=dtype)
        for bucket in trainer.named_weights():
            for name, tensor in bucket.tensors:
                if writer is not None:
                    writer.add(name, tensor)
        if writer is not None:
            writer.close(manifest)
    dist.barrier()


def shard_report(trainer: TrainerBackend, source: HfFolder, *, dtype: str) -> tuple[ShardedTensor, ...]:
    """How each parameter is laid out, and checksums of it gathered and of the source it came from.

    The source is the model folder, so the checksums agree until the first optimiser step.
    """
    own = trainer.local_numel()
    numels = [own] * dist.get_world_size()
    dist.all_gather_object(numels, own)
    gathered, expected, shapes = NamedChecksums(), NamedChecksums(), {}
    for bucket in trainer.named_weights():
        gathered.add(bucket.tensors)
        expected.add([(name, source.tensor(name).to(getattr(torch, dtype))) for name, _ in bucket.tensors])
        shapes.update((name, tuple(tensor.shape)) for name, tensor in bucket.tensors)
    source_checksums = expected.read()
    return tuple(
        ShardedTensor(
            trainer_name=own[name][0],
            hf_name=name,
            shape=shapes[name],
            local_numel=tuple(rank[name][1] for rank in numels),
            checksum=checksum,
            source_checksum=source_checksums[name],
        )
        for name, checksum in gathered.read().items()
    )


def dump_state(trainer: InspectableTrainer, folder: Path, kinds: Sequence[StateKind]) -> None:
    """Rank 0 writes ``<kind>.safetensors`` for each kind, full fp32 tensors, and ``state.json`` with the version.

    One kind at a time is whole in rank 0's memory. An earlier dump in the folder is replaced kind by kind.

    Raises:
        StorageError: the folder cannot be written.
    """
    is_writer = dist.get_rank() == 0
    if is_writer:
        with storage_errors(folder, setting=_SETTING):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _ABOUT).write_text(json.dumps({"policy_version": trainer.policy_version}) + "\n")
    for kind in kinds:
        tensors: dict[str, torch.Tensor] = {}
        for bucket in trainer.named_state(kind):
            if is_writer:
                tensors.update((name, tensor.cpu()) for name, tensor in bucket.tensors)
        if is_writer:
            with storage_errors(folder / f"{kind}.safetensors", setting=_SETTING):
                save_file(tensors, folder / f"{kind}.safetensors")
    dist.barrier()


def restore_state(trainer: InspectableTrainer, folder: Path) -> None:
    """Weights, moments and policy version of `dump_state(…, TRAINING_STATE)`, by whatever backend it was written.

    Raises:
        DataError: a file is missing or unreadable, or holds another model's tensors.
    """
    expected = {entry.name: entry.shape for entry in trainer.manifest().entries}
    try:
        version = int(json.loads((folder / _ABOUT).read_text())["policy_version"])
        for kind in TRAINING_STATE:
            with safe_open(folder / f"{kind}.safetensors", framework="pt") as file:
                found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
                if found != expected:
                    name = sorted(found.keys() ^ expected.keys() or {n for n in found if found[n] != expected[n]})[0]
                    raise DataError(
                        f"{folder / f'{kind}.safetensors'} has {name!r} in shape {found.get(name, 'none')}, the model "
                        f"in {expected.get(name, 'none')}: it is the state of another model"
                    )
                trainer.load_state(kind, file.get_tensor)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise DataError(f"{folder} holds no complete training state: {error}") from error
    trainer.policy_version = version
    dist.barrier()


def load_hf_weights(trainer: InspectableTrainer, source: HfFolder) -> None:
    """Weights of a Hugging Face folder of the same model; moments and policy version stay as they are.

    Raises:
        DataError: the folder holds another model's tensors.
    """
    source.check_tensors({entry.name: entry.shape for entry in trainer.manifest().entries})
    trainer.load_state(StateKind.WEIGHT, lambda name: source.tensor(name).float())
    dist.barrier()
