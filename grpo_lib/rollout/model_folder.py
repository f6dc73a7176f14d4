"""What a Hugging Face model folder holds, checked before an engine spends half a minute on it.

vLLM exempts every linear and embedding layer from its own check for missing weights, so a folder without, say, one
`k_proj` would start and sample from uninitialised memory. Names and shapes are therefore compared here with the model
that the folder's config describes, built by transformers on the meta device (no memory, no weights).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from grpo_lib.data.models import read_tensor_headers
from grpo_lib.errors import DataError

_SHOWN = 5  # names listed in an error


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A checked folder: every tensor its architecture needs is there, in the right shape."""

    path: Path
    tensor_shapes: Mapping[str, tuple[int, ...]]  # Hugging Face name → shape; a tied head is not listed
    vocab_size: int
    max_positions: int | None  # None: the architecture has no such limit


def open_model_folder(path: Path) -> ModelFolder:
    """Read headers only, and compare them with the architecture.

    Raises:
        DataError: no config or weights, a damaged file, missing tensors or wrong shapes; the message names them.
    """
    if not path.is_dir():
        raise DataError(f"model folder {path} does not exist")
    if not (path / "config.json").is_file():
        raise DataError(f"model folder {path} has no config.json; it must be a Hugging Face model folder")
    stored = {name: header.shape for name, header in read_tensor_headers(path).items()}
    needed, tied, vocab_size, max_positions = _describe_architecture(path)
    missing = sorted(set(needed) - set(stored))
    if missing:
        raise DataError(f"model folder {path} lacks {len(missing)} of {len(needed)} tensors: {_shorten(missing)}")
    misshapen = [f"{name} {stored[name]} instead of {needed[name]}" for name in needed if stored[name] != needed[name]]
    if misshapen:
        raise DataError(f"model folder {path}: weights do not fit config.json: {_shorten(misshapen)}")
    return ModelFolder(
        path=path,
        tensor_shapes={name: shape for name, shape in stored.items() if name not in tied},
        vocab_size=vocab_size,
        max_positions=max_positions,
    )


def _describe_architecture(path: Path) -> tuple[dict[str, tuple[int, ...]], frozenset[str], int, int | None]:
    """(needed name → shape, tied names, vocabulary size, position limit) of the model that config.json describes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    tied = frozenset(model._tied_weights_keys or ()) if config.tie_word_embeddings else frozenset()
    needed = {name: shape for name, shape in shapes.items() if name not in tied}
    return needed, tied, int(config.vocab_size), getattr(config, "max_position_embeddings", None)


def _shorten(items: list[str]) -> str:
    more = len(items) - _SHOWN
    return ", ".join(items[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
