"""A Hugging Face model folder, read row by row and written file by file; knows no trainer.

Only safetensors is read: a pickle can run code, and it cannot be sliced, so that every rank would load the whole model.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from grpo_lib.data.files import no_room, storage_errors
from grpo_lib.errors import DataError, StorageError
from grpo_lib.types import WeightEntry, WeightManifest

INDEX = "model.safetensors.index.json"
_FILE_BYTES = 4 << 30  # of one exported safetensors file
_SETTING = "storage.root"

# What goes with the weights unchanged; everything else in the source folder is somebody's notes.
_COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


class HfFolder:
    """Config and tensors of a model folder; files stay memory-mapped while this object lives.

    Raises:
        DataError: the folder, its config, or a weight file is missing or unreadable; the message names it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_dir():
            raise DataError(f"model folder {path} does not exist; set model.path to a folder with config.json")
        self.config: Mapping[str, Any] = _read_json(path / "config.json")
        self._files = {name: _open(file) for file in _weight_files(path) for name in [file.name]}
        self._file_of: dict[str, str] = {}
        for file_name, file in self._files.items():
            for tensor in file.keys():  # noqa: SIM118 not a mapping: only keys() lists the tensors
                if tensor in self._file_of:
                    raise DataError(f"tensor {tensor!r} is in both {self._file_of[tensor]} and {file_name} of {path}")
                self._file_of[tensor] = file_name

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors in the weight files."""
        return frozenset(self._file_of)

    def file_of(self, name: str) -> Path:
        """The file a tensor is in, for messages."""
        return self.path / self._file_of[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Full shape of a tensor, from the file's header."""
        return tuple(self._slice(name).get_shape())

    def tensor(self, name: str) -> torch.Tensor:
        """The whole tensor in the file's dtype."""
        return self._files[self._file_of[name]].get_tensor(name)

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of the first dimension; nothing else is read from disk."""
        return self._slice(name)[start:stop]

    def _slice(self, name: str) -> Any:
        return self._files[self._file_of[name]].get_slice(name)

    def check_tensors(self, expected: Mapping[str, Sequence[int]]) -> None:
        """Raise unless the folder holds exactly these tensors in these shapes, all in a floating dtype.

        Raises:
            DataError: names the missing, unexpected or misshapen tensor and its file.
        """
        missing, unexpected = sorted(expected.keys() - self.names), sorted(self.names - expected.keys())
        if missing:
            raise DataError(
                f"{self.path} lacks {len(missing)} of {len(expected)} tensors, first {missing[0]!r}; "
                "the download or the export is incomplete"
            )
        if unexpected:
            name = unexpected[0]
            raise DataError(
                f"{self.file_of(name)} holds {len(unexpected)} tensors that a {self.config.get('model_type')!r} model "
                f"with this config does not have, first {name!r}; weights and config.json do not belong together"
            )
        for name, shape in expected.items():
            if self.shape(name) != tuple(shape):
                raise DataError(
                    f"{self.file_of(name)}: tensor {name!r} has shape {self.shape(name)}, config.json asks for "
                    f"{tuple(shape)}"
                )
            if (dtype := self._slice(name).get_dtype()) not in ("F32", "BF16", "F16"):
                raise DataError(
                    f"{self.file_of(name)}: tensor {name!r} is stored as {dtype}; quantised weights cannot be trained, "
                    "use the float32, bfloat16 or float16 version of the model"
                )

    def check_tied_copy(self, head: str, embeddings: str) -> None:
        """Some exporters write the head of a tied model too; it must then be the embedding matrix.

        Raises:
            DataError: the two differ.
        """
        if embeddings in self.names and not torch.equal(self.tensor(head), self.tensor(embeddings)):
            raise DataError(
                f"{self.file_of(head)}: {head!r} differs from {embeddings!r}, but config.json says "
                "tie_word_embeddings; set it to false if the head was trained apart"
            )

    def flat(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of the flattened tensor; only the rows that hold them are read."""
        row = math.prod(self.shape(name)[1:])
        first = start // row
        return self.rows(name, first, -(-stop // row)).flatten()[start - first * row : stop - first * row]


class HfFolderWriter:
    """Writes tensors that arrive in manifest order, holding one file's worth at a time.

    Args:
        path: Folder to create.
        source: The model folder whose config, generation config and tokenizer go along.
        manifest: All tensors that will be added, in order.
        dtype: Their dtype name, written into config.json.
        file_bytes: Largest file, and so the memory that is held; one tensor may exceed it.

    Raises:
        StorageError: the folder cannot be written; so do the methods.
    """

    def __init__(
        self, path: Path, *, source: Path, manifest: WeightManifest, dtype: str, file_bytes: int = _FILE_BYTES
    ) -> None:
        self._path = path
        self._file_of = _plan_files(manifest.entries, file_bytes)
        self._pending: dict[str, torch.Tensor] = {}
        self._last_of_file = {file: name for name, file in self._file_of.items()}
        with _writing(path):
            path.mkdir(parents=True, exist_ok=True)
            for name in _COMPANIONS:
                if (source / name).is_file():
                    shutil.copyfile(source / name, path / name)
            _write_config(source / "config.json", path / "config.json", dtype)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one plain tensor; a file is written when its last tensor has arrived."""
        self._pending[name] = tensor.cpu()
        file = self._file_of[name]
        if self._last_of_file[file] == name:
            with _writing(self._path / file):
                save_file(self._pending, self._path / file, metadata={"format": "pt"})
            self._pending = {}

    def close(self, manifest: WeightManifest) -> None:
        """Write the index of a folder with several files."""
        assert not self._pending, sorted(self._pending)
        if len(self._last_of_file) > 1:
            total = sum(_num_bytes(entry) for entry in manifest.entries)
            index = {"metadata": {"total_size": total}, "weight_map": self._file_of}
            with _writing(self._path / INDEX):
                (self._path / INDEX).write_text(json.dumps(index, indent=2) + "\n")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Failures of the block as `StorageError`; safetensors reports a full disk as an error of its own kind."""
    with storage_errors(path, setting=_SETTING):
        try:
            yield
        except SafetensorError as error:
            raise StorageError(no_room(path, str(error), setting=_SETTING)) from error


def _plan_files(entries: Sequence[WeightEntry], file_bytes: int) -> dict[str, str]:
    """Tensor name → file name; consecutive tensors share a file of at most `file_bytes`, or of one tensor."""
    files: list[list[str]] = []
    room = 0
    for entry in entries:
        size = _num_bytes(entry)
        if not files or size > room:
            files.append([])
            room = file_bytes
        files[-1].append(entry.name)
        room -= size
    if len(files) == 1:
        return dict.fromkeys(files[0], "model.safetensors")
    return {
        name: f"model-{number:05d}-of-{len(files):05d}.safetensors"
        for number, names in enumerate(files, start=1)
        for name in names
    }


def _num_bytes(entry: WeightEntry) -> int:
    return math.prod(entry.shape) * getattr(torch, entry.dtype).itemsize


def _write_config(source: Path, target: Path, dtype: str) -> None:
    """Copy config.json byte for byte, unless its dtype is not that of the weights beside it."""
    config = _read_json(source)
    key = "torch_dtype" if "torch_dtype" in config else "dtype"  # the name before and since transformers 5
    if config.get(key) == dtype:
        shutil.copyfile(source, target)
    else:
        target.write_text(json.dumps({**config, key: dtype}, indent=2) + "\n")


def _weight_files(path: Path) -> list[Path]:
    if (path / INDEX).is_file():
        names = sorted(set(_read_json(path / INDEX).get("weight_map", {}).values()))
        absent = [name for name in names if not (path / name).is_file()]
        if absent or not names:
            raise DataError(f"{path / INDEX} lists {absent or 'no files'}, which {path} does not hold")
        return [path / name for name in names]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        pickles = sorted(file.name for file in path.glob("*.bin"))
        hint = f"; {pickles[0]} must be converted to safetensors first" if pickles else ""
        raise DataError(f"model folder {path} has no weights: no *.safetensors file{hint}")
    return files


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise DataError(f"{file} is not a readable safetensors file: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise DataError(f"{file} is missing; set model.path to a Hugging Face model folder") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{file} must hold a JSON object, not a {type(content).__name__}")
    return content
