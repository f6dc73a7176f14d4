"""`grpo convert-gguf`: the model of a GGUF file as a Hugging Face folder with its tokenizer.

transformers reads the format, undoes llama.cpp's order of the rotary dimensions and unpacks quantised blocks. What was
lost when a file was quantised stays lost: the folder holds the values that the file stands for.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf import GGUFReader

from grpo_lib.data.models import ModelFacts, inspect_model
from grpo_lib.errors import DataError

_SPECIAL_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedModel:
    """What was written, and from what."""

    folder: Path
    source: str  # name of the GGUF
    facts: ModelFacts


def run(out: Path, *, file: Path | None = None, package: str | None = None, dtype: str = "bfloat16") -> ConvertedModel:
    """Convert one file.

    Args:
        out: Folder to create; it must not exist, or be empty.
        file: A .gguf file, or a wheel that holds one.
        package: Name of an installed package that holds one, instead of `file`.

    Raises:
        DataError: there is no GGUF, or more than one; it is damaged, or of an architecture that is not supported.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise DataError(f"{out} exists already; choose another folder, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        with _gguf_of(file, package, Path(scratch)) as gguf:
            folder = Path(scratch) / out.name
            _convert(gguf, folder, getattr(torch, dtype))
            facts = inspect_model(folder)
            source = gguf.name
        os.replace(folder, out)
    return ConvertedModel(folder=out, source=source, facts=facts)


@contextmanager
def _gguf_of(file: Path | None, package: str | None, scratch: Path) -> Iterator[Path]:
    if (file is None) == (package is None):
        raise DataError("give either a file or --package, and not both")
    if package is not None:
        yield _in_package(package)
        return
    assert file is not None
    if not file.is_file():
        raise DataError(f"{file} is not a file")
    if not zipfile.is_zipfile(file):
        yield file
        return
    with zipfile.ZipFile(file) as archive:
        member = _only(str(file), [name for name in archive.namelist() if name.endswith(".gguf")])
        target = scratch / Path(member).name  # a name of ours, whatever path the archive gives
        with archive.open(member) as packed, target.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 24)
    yield target
    target.unlink()


def _in_package(package: str) -> Path:
    try:
        files = importlib.metadata.files(package) or ()
    except importlib.metadata.PackageNotFoundError as error:
        raise DataError(f"package {package} is not installed; `pip install {package}`, or give its wheel") from error
    found = {str(entry): Path(str(entry.locate())) for entry in files if entry.name.endswith(".gguf")}
    return found[_only(f"package {package}", list(found))]


def _only(place: str, names: list[str]) -> str:
    if len(names) != 1:
        raise DataError(f"{place} holds {len(names)} .gguf files ({', '.join(names) or 'none'}); expected one")
    return names[0]


def _convert(gguf: Path, folder: Path, dtype: torch.dtype) -> None:
    with gguf.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise DataError(f"{gguf} does not begin with GGUF: it is another format, or damaged")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, **_dense_weights()
        )
    except (OSError, ValueError, KeyError, RuntimeError, IndexError, struct.error) as error:
        raise DataError(f"{gguf} cannot be read: {type(error).__name__}: {error}") from error
    _name_special_tokens(tokenizer, gguf)
    _forget_quantization(model)
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _name_special_tokens(tokenizer: Any, gguf: Path) -> None:
    """As the file numbers them: transformers 5.17 takes the token that begins a turn for the one that ends it, and a
    run would stop at both."""
    for key in [key for key in tokenizer.init_kwargs if key.endswith("_token_id")]:
        del tokenizer.init_kwargs[key]  # it would be saved, and read again as the token's number
    fields = GGUFReader(gguf).fields
    for role, key in _SPECIAL_TOKENS.items():
        if (field := fields.get(key)) is not None:
            setattr(tokenizer, role, tokenizer.convert_ids_to_tokens(int(field.contents())))


def _dense_weights() -> dict[str, Any]:
    """From transformers 5.18 on weights stay packed, and cannot be saved, unless that is asked for."""
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def _forget_quantization(model: Any) -> None:
    """`save_pretrained` would write that the dense weights are quantised, and readers would believe it."""
    for key in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, key):
            delattr(model.config, key)
    model.hf_quantizer = None
