"""`grpo make-model`: random weights in a known model's shape, as a Hugging Face folder, for benchmarks and tests.

Weights are drawn layer by layer, and a sample of random tokens runs through each layer before it is dropped, so that
memory holds one layer, the embeddings and one file at a time. The sample also sets the one weight that decides how
sharp the predictions are: the gain of the final norm, chosen so that the mean entropy of the next token is
`ENTROPY_NATS`. Plain random weights predict almost uniformly, and a sampler or a log-probability of such a model is
not that of a trained one.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from grpo_lib.data.models import (
    BUILTIN_FOLDER,
    ModelFacts,
    needed_tensors,
    read_model_config,
    read_tensor_headers,
    resolve_model_path,
)
from grpo_lib.errors import DataError
from grpo_lib.trainers.hf_checkpoint import HfFolderWriter
from grpo_lib.types import WeightEntry, WeightManifest

ENTROPY_NATS = 2.5  # of trained language models of this size on their own text
_STD = 0.02  # of every matrix, as in GPT-2
_SAMPLE_SHAPE = (32, 16)  # sequences, tokens; the gain is set on one half and measured on the other
_TAIL = 100  # tokens that are not the tail
_FILE_BYTES = 1 << 30
# The byte-level tokenizer of the shipped model: 8 special tokens and the 256 bytes. Its ids fit any vocabulary from
# here on, and the other rows of the embeddings are just never prompted with.
_TOKENIZER_SOURCE = BUILTIN_FOLDER / "tiny_qwen3"
_TOKENIZER_SIZE, _PAD_ID, _EOS_ID = 264, 0, 1
_COMPANION_SUFFIXES = (".json", ".jinja", ".model", ".txt")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

_QWEN3: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}, "use_sliding_window": False,
}  # fmt: skip


def _sizes(hidden: int, layers: int, heads: int, kv_heads: int, inner: int, *, tied: bool) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": inner, "tie_word_embeddings": tied,
    }  # fmt: skip


SHAPES: Mapping[str, Mapping[str, Any]] = {
    "qwen3_0_6b": {**_QWEN3, **_sizes(1024, 28, 16, 8, 3072, tied=True)},
    "qwen3_1_7b": {**_QWEN3, **_sizes(2048, 28, 16, 8, 6144, tied=True)},
    "qwen3_4b": {**_QWEN3, **_sizes(2560, 36, 32, 8, 9728, tied=True)},
    "qwen3_8b": {**_QWEN3, **_sizes(4096, 36, 32, 8, 12288, tied=False)},
    "smollm2_135m": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        **_sizes(576, 30, 9, 3, 1536, tied=True),
    },
    "olmo2_1b": {
        "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "vocab_size": 100352,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        **_sizes(2048, 16, 16, 16, 8192, tied=False),
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """Next-token distributions after random tokens that did not take part in setting the gain."""

    num_positions: int
    entropy_mean: float  # nats
    entropy_p05: float
    entropy_p95: float
    top1_mean: float  # probability of the likeliest token
    tail_mean: float  # probability of all but the `_TAIL` likeliest tokens together


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeModel:
    """What was written."""

    folder: Path
    num_parameters: int
    num_bytes: int
    num_files: int
    final_norm_gain: float
    predictions: Predictions
    seconds: float


def run(like: str, out: Path, *, dtype: str = "bfloat16", seed: int = 0, device: str | None = None) -> MadeModel:
    """Write the model.

    Args:
        like: A name in `SHAPES`, or a model folder (or just its config.json and tokenizer) to take the shape from.
        out: Folder to create; it must not exist, or be empty.
        device: Where weights are drawn: another kind of device draws other ones. A GPU where there is one by default.

    Raises:
        DataError: `like` is neither, `out` is in use, or the shape is not supported.
    """
    started = time.perf_counter()
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise DataError(f"{out} exists already; choose another folder, or remove it")
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        companions, folder = Path(scratch) / "companions", Path(scratch) / out.name
        _write_companions(like, companions)
        facts = read_model_config(companions / "config.json")
        shapes = needed_tensors(facts)
        manifest = WeightManifest(
            entries=tuple(WeightEntry(name=name, dtype=dtype, shape=shape) for name, shape in shapes.items())
        )
        writer = HfFolderWriter(folder, source=companions, manifest=manifest, dtype=dtype, file_bytes=_FILE_BYTES)
        model = _StreamedModel(facts, companions / "config.json", getattr(torch, dtype), seed, place)
        for name, tensor in model.tensors(shapes):
            writer.add(name, tensor)
        writer.close(manifest)
        origin = {"command": "grpo make-model", "like": like, "seed": seed, "device": place.type}
        (folder / "provenance.json").write_text(json.dumps(origin, indent=2) + "\n")
        num_files = len(list(folder.glob("*.safetensors")))
        assert read_tensor_headers(folder).keys() == shapes.keys()
        os.replace(folder, out)
    count = sum(math.prod(shape) for shape in shapes.values())
    return MadeModel(
        folder=out,
        num_parameters=count,
        num_bytes=count * getattr(torch, dtype).itemsize,
        num_files=num_files,
        final_norm_gain=model.gain,
        predictions=model.predictions(),
        seconds=time.perf_counter() - started,
    )


def _write_companions(like: str, folder: Path) -> None:
    """Config, generation config and tokenizer: those of a given folder, or ours."""
    folder.mkdir()
    if like in SHAPES:
        config = {**SHAPES[like], "hidden_act": "silu", "attention_bias": False}
        return _write_own(folder, config, config["max_position_embeddings"])
    source = _folder_of(like)
    if (source / "tokenizer.json").is_file():
        for file in source.iterdir():
            if file.suffix in _COMPANION_SUFFIXES and "safetensors" not in file.name:
                shutil.copyfile(file, folder / file.name)
        return None
    config = json.loads((source / "config.json").read_bytes())
    return _write_own(folder, config, config.get("max_position_embeddings") or _SAMPLE_SHAPE[1])


def _folder_of(like: str) -> Path:
    source = Path(like).expanduser()
    if not (source / "config.json").is_file():
        try:
            source = resolve_model_path(like)
        except DataError as error:
            raise DataError(
                f"--like {like}: neither a shape ({', '.join(SHAPES)}) nor a model folder with a config.json: {error}"
            ) from error
    return source


def _write_own(folder: Path, config: Mapping[str, Any], max_position: int) -> None:
    """The config with our tokenizer beside it, and its stop and padding ids."""
    if config.get("vocab_size", 0) < _TOKENIZER_SIZE:
        raise DataError(
            f"vocab_size {config.get('vocab_size')} is below the {_TOKENIZER_SIZE} ids of the byte-level tokenizer "
            "that a shape without one gets; put a tokenizer.json beside its config.json"
        )
    ids = {"bos_token_id": None, "eos_token_id": _EOS_ID, "pad_token_id": _PAD_ID}
    (folder / "config.json").write_text(json.dumps({**config, **ids}, indent=2) + "\n")
    stops = {"eos_token_id": _EOS_ID, "pad_token_id": _PAD_ID}
    (folder / "generation_config.json").write_text(json.dumps(stops, indent=2) + "\n")
    for name in _TOKENIZER_FILES:
        shutil.copyfile(_TOKENIZER_SOURCE / name, folder / name)
    path = folder / "tokenizer_config.json"
    tokenizer = {**json.loads(path.read_bytes()), "model_max_length": max_position}
    path.write_text(json.dumps(tokenizer, indent=2) + "\n")


class _StreamedModel:
    """Weights in checkpoint order, and what a sample of tokens has become after the layers drawn so far."""

    def __init__(self, facts: ModelFacts, config: Path, dtype: torch.dtype, seed: int, device: torch.device) -> None:
        self._facts, self._dtype, self._device = facts, dtype, device
        self._generator = torch.Generator(device).manual_seed(seed)
        self._block = _OneBlock(config, device)
        self._tokens = torch.randint(facts.vocab_size, _SAMPLE_SHAPE, generator=self._generator, device=device)
        self._hidden = torch.zeros(0)
        self._head = torch.zeros(0)
        self.gain = math.nan

    @torch.no_grad()
    def tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor once; the final norm is the last to be known, and the head, where there is one, comes after."""
        embeddings = self._draw("model.embed_tokens.weight", shapes["model.embed_tokens.weight"])
        yield "model.embed_tokens.weight", embeddings
        self._hidden = embeddings[self._tokens].float()
        for layer in range(self._facts.num_layers):
            prefix = f"model.layers.{layer}."
            weights = {name: self._draw(name, shape) for name, shape in shapes.items() if name.startswith(prefix)}
            self._hidden = self._block({name.removeprefix(prefix): w for name, w in weights.items()}, self._hidden)
            yield from weights.items()
        self._head = embeddings if self._facts.tied_embeddings else self._draw("lm_head.weight", embeddings.shape)
        self._hidden = torch.nn.functional.rms_norm(self._hidden, self._hidden.shape[-1:]).flatten(0, 1)
        norm = torch.full(shapes["model.norm.weight"], self._sharpening_gain(), dtype=self._dtype, device=self._device)
        self.gain = norm[0].item()
        yield "model.norm.weight", norm
        if not self._facts.tied_embeddings:
            yield "lm_head.weight", self._head

    @torch.no_grad()
    def predictions(self) -> Predictions:
        """Of the half of the sample that did not set the gain."""
        logits = self._logits(slice(len(self._hidden) // 2, None)) * self.gain
        entropy, probabilities = _entropy(logits), logits.softmax(-1)
        top = probabilities.topk(min(_TAIL, logits.shape[-1])).values
        low, high = entropy.quantile(torch.tensor([0.05, 0.95], device=entropy.device)).tolist()
        return Predictions(
            num_positions=len(logits),
            entropy_mean=entropy.mean().item(),
            entropy_p05=low,
            entropy_p95=high,
            top1_mean=top[:, 0].mean().item(),
            tail_mean=(1 - top.sum(-1)).clamp(min=0).mean().item(),
        )

    def _draw(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Norms 1, biases 0, matrices normal; those that add to the residual stream are smaller, or depth sharpens."""
        if name.endswith("bias"):
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        ends_branch = name.endswith(("o_proj.weight", "down_proj.weight"))
        std = _STD / math.sqrt(2 * self._facts.num_layers) if ends_branch else _STD
        drawn = torch.empty(shape, device=self._device).normal_(0.0, std, generator=self._generator)
        return drawn.to(self._dtype)

    def _logits(self, positions: slice) -> torch.Tensor:
        """[positions, vocabulary] float32 for a gain of 1."""
        states = self._hidden[positions]
        return torch.cat([states @ rows.float().t() for rows in self._head.split(1 << 14)], dim=-1)

    def _sharpening_gain(self) -> float:
        """Bisection in log space: entropy falls from log(vocabulary) to 0 as the gain grows."""
        logits = self._logits(slice(None, len(self._hidden) // 2))
        low, high = 1e-2, 1e4
        for _ in range(24):
            middle = math.sqrt(low * high)
            if _entropy(logits * middle).mean().item() > ENTROPY_NATS:
                low = middle
            else:
                high = middle
        return high


def _entropy(logits: torch.Tensor) -> torch.Tensor:
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


class _OneBlock:
    """transformers' own decoder block of an architecture, in fp32, filled anew for every layer."""

    def __init__(self, config: Path, device: torch.device) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        plain = json.loads(config.read_bytes())
        # One layer, and a vocabulary that costs nothing; ids of special tokens would lie outside of it.
        plain = {key: value for key, value in plain.items() if not key.endswith("token_id") and key != "layer_types"}
        small = AutoConfig.for_model(**{**plain, "num_hidden_layers": 1, "vocab_size": 8, "dtype": "float32"})
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(small, key, None)
        with torch.device(device):
            # Only sdpa is causal without a mask.
            model = AutoModelForCausalLM.from_config(small, attn_implementation="sdpa").eval()
        self._block, self._rotary = model.model.layers[0], model.model.rotary_emb

    def __call__(self, weights: Mapping[str, torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        parameters = dict(self._block.named_parameters())
        assert parameters.keys() == weights.keys(), parameters.keys() ^ weights.keys()
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        output = self._block(
            hidden,
            attention_mask=None,
            position_ids=positions,
            position_embeddings=self._rotary(hidden, positions),
            use_cache=False,
        )
        return output[0] if isinstance(output, tuple) else output
