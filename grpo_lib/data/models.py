"""Model folders: where they are and what their headers say. No torch and no weights: milliseconds for any size."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_lib.errors import DataError

BUILTIN_PREFIX = "builtin:"
BUILTIN_FOLDER = Path(__file__).resolve().parents[1] / "models"
CACHED_PREFIX = "cached:"
CACHED_MODELS = ("smollm2_135m",)  # those that `grpo get-model` knows how to get
SUPPORTED_FAMILIES = ("llama", "olmo2", "qwen3")
_INDEX = "model.safetensors.index.json"
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_MAX_HEADER_BYTES = 100 * 2**20  # the safetensors format's own limit
_SHOWN = 5  # names listed in an error


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """One tensor as a safetensors header describes it."""

    dtype: str  # the format's name, e.g. "F32", "BF16"
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a checked model folder says about itself."""

    model_type: str
    num_parameters: int  # of the tensors that the architecture needs, a tied head counted once
    vocab_size: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tied_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    max_position: int
    dtypes: tuple[str, ...]  # of the stored tensors, safetensors names, sorted


def resolve_model_path(path: str) -> Path:
    """The local folder of a model.

    Args:
        path: `builtin:<name>`, `cached:<name>` for what `grpo get-model` brought, a local folder, or a hub name such as
            `Qwen/Qwen3-4B-Base`, which is fetched into the hub's cache unless it is there already.

    Raises:
        DataError: no such model, with the choices.
    """
    if path.startswith(BUILTIN_PREFIX):
        folder = BUILTIN_FOLDER / path.removeprefix(BUILTIN_PREFIX)
        names = sorted(entry.name for entry in BUILTIN_FOLDER.iterdir() if (entry / "config.json").is_file())
        if folder.name not in names or folder.parent != BUILTIN_FOLDER:
            raise DataError(f"no built-in model {path!r}; there are {', '.join(BUILTIN_PREFIX + n for n in names)}")
        return folder
    if path.startswith(CACHED_PREFIX):
        return _cached_model(path.removeprefix(CACHED_PREFIX))
    local = Path(path).expanduser()
    if path and local.is_dir():
        return local.resolve()
    if not path or path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise DataError(f"model folder {path!r} does not exist")
    return _hub_snapshot(path)


def model_cache() -> Path:
    """Where `grpo get-model` puts models: `$XDG_CACHE_HOME/grpo/models`, which is `~/.cache/grpo/models` by default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grpo" / "models"


def _cached_model(name: str) -> Path:
    if name not in CACHED_MODELS:
        choices = ", ".join(CACHED_PREFIX + known for known in CACHED_MODELS)
        raise DataError(f"no model {CACHED_PREFIX}{name}; there are {choices}")
    folder = model_cache() / name
    if not folder.is_dir():
        raise DataError(f"{folder} is not there yet; `grpo get-model {name}` makes it once, for all runs")
    return folder


def _hub_snapshot(name: str) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    advice = "download it on a machine with a network and give the folder as model.path"
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_HUB_FILES))
    except HFValidationError as error:
        raise DataError(f"{name!r} is neither a folder here nor a valid hub name: {error}") from error
    except LocalEntryNotFoundError as error:
        raise DataError(
            f"model {name!r} is neither a folder here nor in the hub's cache, and the hub cannot be reached; {advice}"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise DataError(f"model {name!r} could not be fetched from the hub: {error}; {advice}") from error


def inspect_model(folder: Path) -> ModelFacts:
    """Check config and tensor headers against the architecture, and say what the model is.

    Raises:
        DataError: config or weights are missing or damaged, the architecture is not supported, or a tensor is absent
            or has another shape than the config says.
    """
    facts = read_model_config(folder / "config.json")
    stored = read_tensor_headers(folder)
    needed = needed_tensors(facts)
    missing = [name for name in needed if name not in stored]
    if missing:
        raise DataError(f"model folder {folder} lacks {len(missing)} of {len(needed)} tensors: {_shorten(missing)}")
    misshapen = [
        f"{name} is {list(stored[name].shape)} instead of {list(shape)}"
        for name, shape in needed.items()
        if stored[name].shape != shape
    ]
    if misshapen:
        raise DataError(f"model folder {folder}: weights do not fit config.json: {_shorten(misshapen)}")
    return replace(
        facts,
        num_parameters=sum(math.prod(shape) for shape in needed.values()),
        dtypes=tuple(sorted({stored[name].dtype for name in needed})),
    )


def read_model_config(path: Path) -> ModelFacts:
    """What a config.json says: everything but `num_parameters` and `dtypes`, which the weights decide.

    Raises:
        DataError: it is missing or damaged, or the architecture is not supported.
    """
    if not path.is_file():
        what = "has no config.json" if path.parent.is_dir() else "does not exist"
        raise DataError(f"model folder {path.parent} {what}; it must be a Hugging Face model folder")
    config = _json_object(path)
    model_type = config.get("model_type")
    if model_type not in SUPPORTED_FAMILIES:
        raise DataError(
            f"{path}: model_type {model_type!r} is not supported; it must be one of {', '.join(SUPPORTED_FAMILIES)}"
        )

    def number(key: str, default: int | None = None) -> int:
        value = config.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise DataError(f"{path}: {key} is {value!r}; a {model_type} model needs a positive integer there")
        return value

    heads, hidden = number("num_attention_heads"), number("hidden_size")
    # transformers' own defaults where an older config leaves a key out
    head_dim = number("head_dim", 128 if model_type == "qwen3" else hidden // heads)
    kv_heads = number("num_key_value_heads", 32 if model_type == "qwen3" else heads)
    if heads % kv_heads:
        raise DataError(f"{path}: num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})")
    return ModelFacts(
        model_type=model_type,
        num_parameters=0,
        vocab_size=number("vocab_size"),
        num_layers=number("num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=number("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        max_position=number("max_position_embeddings"),
        dtypes=(),
    )


def needed_tensors(facts: ModelFacts) -> dict[str, tuple[int, ...]]:
    """Hugging Face name → shape of every tensor that the architecture needs; a tied head is not one of them."""
    hidden, inner = facts.hidden_size, facts.intermediate_size
    query, key_value = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    norms = {
        "llama": {"input_layernorm": hidden, "post_attention_layernorm": hidden},
        "qwen3": {
            "self_attn.q_norm": facts.head_dim,
            "self_attn.k_norm": facts.head_dim,
            "input_layernorm": hidden,
            "post_attention_layernorm": hidden,
        },
        "olmo2": {
            "self_attn.q_norm": query,
            "self_attn.k_norm": key_value,
            "post_attention_layernorm": hidden,
            "post_feedforward_layernorm": hidden,
        },
    }[facts.model_type]
    linears = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key_value, hidden),
        "self_attn.v_proj": (key_value, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    biased = ("self_attn",) * facts.attention_bias + ("mlp",) * facts.mlp_bias
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (facts.vocab_size, hidden)}
    for layer in range(facts.num_layers):
        prefix = f"model.layers.{layer}."
        shapes.update({f"{prefix}{name}.weight": shape for name, shape in linears.items()})
        shapes.update({f"{prefix}{name}.bias": shape[:1] for name, shape in linears.items() if name.startswith(biased)})
        shapes.update({f"{prefix}{name}.weight": (size,) for name, size in norms.items()})
    shapes["model.norm.weight"] = (hidden,)
    if not facts.tied_embeddings:
        shapes["lm_head.weight"] = (facts.vocab_size, hidden)
    return shapes


def read_tensor_headers(folder: Path) -> dict[str, TensorHeader]:
    """Name → header of every tensor in the folder's safetensors files.

    Raises:
        DataError: there is no such file, one is cut off or damaged, or the index names a file or tensor that is not
            there.
    """
    index = folder / _INDEX
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise DataError(
                f"model folder {folder} has no *.safetensors file; other formats are not read, so save the model with "
                "save_pretrained() of a current transformers"
            )
        return {name: header for file in files for name, header in _read_header(file).items()}
    homes = _json_object(index).get("weight_map")
    if not isinstance(homes, dict) or not all(isinstance(home, str) for home in homes.values()):
        raise DataError(f"{index}: weight_map is not an object of tensor names and file names")
    absent = sorted({home for home in homes.values() if not (folder / home).is_file()})
    if absent:
        raise DataError(f"{index} lists files that are not there: {_shorten(absent)}; copy the folder again")
    headers = {home: _read_header(folder / home) for home in set(homes.values())}
    lost = [f"{name} ({home})" for name, home in homes.items() if name not in headers[home]]
    if lost:
        raise DataError(f"{index} lists {len(lost)} tensors that their files do not hold: {_shorten(lost)}")
    return {name: headers[home][name] for name, home in homes.items()}


def _read_header(file: Path) -> dict[str, TensorHeader]:
    """The JSON header of one file, and a check that all the bytes it describes are there."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < header_bytes <= min(size - 8, _MAX_HEADER_BYTES):
            raise DataError(f"{file} is not a safetensors file, or it is cut off at {size} bytes; copy it again")
        raw = stream.read(header_bytes)
    try:
        entries: Mapping[str, Any] = json.loads(raw)
        described = {name: entry for name, entry in entries.items() if name != "__metadata__"}
        headers = {
            name: TensorHeader(dtype=entry["dtype"], shape=tuple(entry["shape"])) for name, entry in described.items()
        }
        end = 8 + header_bytes + max((entry["data_offsets"][1] for entry in described.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise DataError(f"{file}: its safetensors header is damaged: {error!r}; copy it again") from error
    if size < end:
        raise DataError(f"{file} is cut off: {size:,} of {end:,} bytes; copy it again")
    return headers


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path} holds a JSON {type(value).__name__}; expected an object")
    return value


def _shorten(items: list[str]) -> str:
    more = len(items) - _SHOWN
    return ", ".join(items[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
