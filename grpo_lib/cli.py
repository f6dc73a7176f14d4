"""`grpo`: what can be asked of a configuration, a machine and stored runs. Torch, Ray and vLLM load when needed.

Exit codes: 0 fine, 1 the machine falls short, 2 the command or the configuration is wrong.
`grpo parity`: 0 PASS, 1 FAIL, 3 INCONCLUSIVE, 2 no verdict.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from grpo_lib import cli_models, cli_parity, cli_run, cli_store
from grpo_lib.config import RunConfig, config_hash, flat, resolve, settings
from grpo_lib.data.models import inspect_model, resolve_model_path
from grpo_lib.derived import Derived, derive, gib, model_problems
from grpo_lib.errors import ConfigError, DataError, GrpoError
from grpo_lib.recipes import RECIPES, default_recipe

OK, SHORTFALL, MISTAKE = 0, 1, 2
# What changes how ranks and engines behave, and is easily left over from another experiment.
_SWITCHES = (
    "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "METAFLOW_USER", "OMP_NUM_THREADS", "RAY_ADDRESS", "RAY_AUTH_MODE",
    "VLLM_ENABLE_V1_MULTIPROCESSING", "WANDB_MODE",
)  # fmt: skip
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a user's mistake is printed without a traceback."""
    options = _parser().parse_args(arguments)
    try:
        return options.command(options)
    except (ConfigError, DataError) as error:
        return _refuse(str(error).splitlines())
    except GrpoError as error:
        print(f"grpo: {error}", file=sys.stderr)
        return SHORTFALL


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="grpo", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = _run_options()

    def add(name: str, command: Callable[[argparse.Namespace], int], help_text: str, *parents: argparse.ArgumentParser):
        added = commands.add_parser(name, help=help_text, description=help_text, parents=list(parents))
        added.set_defaults(command=command)
        return added

    add(
        "validate", _validate, "Print the resolved configuration and everything that follows from it.", run
    ).add_argument("--json", action="store_true", help="one JSON object instead of text")
    add("preflight", _preflight, "Check whether this machine can hold the run.", run)
    add("doctor", _doctor, "Report packages, processor, devices and leftovers of this environment.")
    add("config-docs", _config_docs, "Print docs/configuration.md, generated from the settings' descriptions.")
    cli_models.register(commands)
    cli_parity.register(commands)
    cli_run.register(commands)
    cli_store.register(commands)
    return parser


def _run_options() -> argparse.ArgumentParser:
    """Options of every command that speaks about one run; the flow has the same."""
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--recipe", default=default_recipe.__name__, help="named configuration to start from")
    options.add_argument(
        "--set", action="append", default=[], metavar="KEY.PATH=VALUE", dest="overrides", help="repeatable"
    )
    options.add_argument("--trainer", help="trainer backend, the same as --set trainer.backend=...")
    options.add_argument("--seed", type=int, help="run seed")
    return options


def _refuse(problems: Sequence[str]) -> int:
    noun = "problem" if len(problems) == 1 else "problems"
    print(f"grpo: {len(problems)} {noun}:", *(f"  - {problem}" for problem in problems), sep="\n", file=sys.stderr)
    return MISTAKE


def _resolved(options: argparse.Namespace) -> RunConfig:
    """Problems between the configuration and its model are reported with the others."""
    return resolve(
        options.recipe, options.overrides, trainer=options.trainer, seed=options.seed, more_rules=_model_rules
    )


def _model_rules(config: RunConfig) -> list[str]:
    try:
        facts = inspect_model(resolve_model_path(config.model.path))
    except DataError as error:
        return [f"model.path ({config.model.path}): {error}"]
    return model_problems(config, facts)


def _validate(options: argparse.Namespace) -> int:
    config = _resolved(options)
    derived = derive(config, inspect_model(resolve_model_path(config.model.path)))
    if options.json:
        plain = {"config": config.model_dump(mode="json"), "hash": config_hash(config), "derived": derived.to_dict()}
        print(json.dumps(plain))
        return OK
    print("\n".join(_config_lines(config)))
    print("\nderived:")
    width = max(len(name) for name, _ in derived_lines(derived))
    for name, text in derived_lines(derived):
        print(f"  {name:<{width}}  {text}")
    print(f"\nhash: {config_hash(config)}")
    return OK


def _config_lines(config: RunConfig) -> Iterator[str]:
    """YAML; what differs from the default says what the default is."""
    fields, section = settings(), ""
    for key, value in flat(config).items():
        head, _, leaf = key.rpartition(".")
        if head != section:
            section = head
            yield f"{section}:"
        default = fields[key].get_default()
        plain = list(default) if isinstance(default, tuple) else default
        note = "" if fields[key].is_required() or value == plain else f"  # default {json.dumps(plain)}"
        yield f"{'  ' if head else ''}{leaf}: {json.dumps(value)}{note}"


def derived_lines(derived: Derived) -> list[tuple[str, str]]:
    """Name and value of each derived quantity, for people."""
    rank, engine = derived.rank_memory, derived.engine_memory
    epochs = "known after prepare_data" if derived.epochs is None else f"{derived.epochs:g}"
    cache = (
        "what its share of a GPU leaves" if derived.kv_cache_tokens is None else f"{derived.kv_cache_tokens:,} tokens"
    )
    return [
        ("steps", f"{derived.steps:,} (at most as many optimiser steps)"),
        ("samples", f"{derived.samples_per_step:,} per step, {derived.samples_total:,} in all"),
        ("epochs", epochs),
        ("evaluation", f"{derived.evaluation_samples:,} samples, before and after together"),
        ("longest sample", f"{derived.max_sample_tokens:,} tokens"),
        (
            "tokens per step",
            f"at most {derived.max_tokens_per_step:,}, of which {derived.max_response_tokens_per_step:,} response",
        ),
        ("packs per step", f"{derived.packs_per_step.low:,} ... {derived.packs_per_step.high:,}"),
        ("packs per rank", f"{derived.packs_per_rank.low:,} ... {derived.packs_per_rank.high:,}"),
        (
            "micro-batches per rank",
            f"{derived.micro_batches_per_rank.low:,} ... {derived.micro_batches_per_rank.high:,}",
        ),
        ("memory of a rank", f"{gib(rank.total)}: {_parts(rank)}"),
        ("memory of an engine", f"{gib(engine.total)}: {_parts(engine)}"),
        ("host memory", f"{gib(derived.host_memory_bytes)} with Ray and the driver"),
        ("KV cache of an engine", f"{cache}, {derived.kv_bytes_per_token:,} bytes per token"),
        ("checkpoint", gib(derived.checkpoint_bytes)),
        ("disk", f"{gib(derived.disk_bytes)} at the fullest"),
        ("reserved", f"{derived.cpus:g} CPUs, {derived.gpus:g} GPUs"),
    ]


def _parts(memory: Any) -> str:
    return ", ".join(f"{name} {gib(getattr(memory, name))}" for name in memory.__slots__)


def _preflight(options: argparse.Namespace) -> int:
    from grpo_lib.preflight import check_machine  # `validate` does without its imports, a third of the time
    from grpo_lib.stages.store_check import store_check

    config = _resolved(options)
    facts = inspect_model(resolve_model_path(config.model.path))
    result = check_machine(config, facts, root=Path(config.storage.root), more=[store_check(config)])
    width = max(len(check.name) for check in result.checks)
    for check in result.checks:
        print(f"{'ok   ' if check.ok else 'SHORT'}  {check.name:<{width}}  {check.detail}")
    short = sum(not check.ok for check in result.checks)
    if short:
        print(f"grpo: this machine falls short in {short} of {len(result.checks)} checks", file=sys.stderr)
    return SHORTFALL if short else OK


def _doctor(options: argparse.Namespace) -> int:
    """Everything a bug report needs; exit 1 when a package that every run needs is missing or out of range."""
    from packaging.specifiers import SpecifierSet

    from grpo_lib.preflight import PACKAGES, inspect_machine, installed

    machine = inspect_machine(Path.cwd())
    print(f"python      {platform.python_version()} on {platform.platform()}, {sys.executable}")
    print(f"CPUs        {machine.cpus:g}; {', '.join(_cpu_flags()) or 'none of ' + ', '.join(_CPU_FLAGS)}")
    print(f"memory      {gib(machine.memory_available_bytes)} available of {gib(machine.memory_total_bytes)}")
    print(f"GPUs        {machine.gpus} visible")
    print(f"disk        {gib(machine.disk_free_bytes)} free here")
    broken = 0
    for package in PACKAGES:
        name, version, wanted = installed(package)
        required = package.needed(default_recipe())
        fits = version is not None and SpecifierSet(wanted, prereleases=True).contains(version)
        broken += required and not fits
        state = "ok" if fits else f"outside {wanted}" if version else "not installed"
        print(f"package     {' '.join(filter(None, (name, version)))}: {state}{'' if required else ' (optional)'}")
    for module in ("torch", "ray", "vllm", "olmo_core", "metaflow"):
        spec = find_spec(module)
        print(f"module      {module}: {spec.origin if spec else 'not importable'}")
    for name in _SWITCHES:
        print(f"environment {name}={os.environ.get(name, '')}")
    for line in _leftovers(Path(tempfile.gettempdir()), os.environ):
        print(f"note        {line}")
    return SHORTFALL if broken else OK


def _cpu_flags() -> list[str]:
    """Of the instruction sets that choose vLLM's CPU kernels, those this processor has."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return [flag for flag in _CPU_FLAGS if flag in line.split()]


def _leftovers(temporary: Path, environment: Mapping[str, str]) -> list[str]:
    """Things other runs left behind, and what they mean for the next one."""
    notes = []
    address = temporary / "ray" / "ray_current_cluster"
    if address.exists():
        notes.append(
            f"{address} names a Ray cluster ({address.read_text().strip()}); runs start their own and ignore it"
        )
    if environment.get("RAY_ADDRESS"):
        notes.append(f"RAY_ADDRESS={environment['RAY_ADDRESS']} is set; runs start their own cluster and ignore it")
    return notes


def _config_docs(options: argparse.Namespace) -> int:
    print(configuration_markdown(), end="")
    return OK


def configuration_markdown() -> str:
    """docs/configuration.md: every setting with type, default, limits and meaning, then the recipes and the rules."""
    from grpo_lib.rules import RULES

    lines = [
        "# Configuration",
        "",
        "Generated by `grpo config-docs > docs/configuration.md`. `grpo validate --set key.path=value` shows what a",
        "change results in and every broken rule, in under a second. A value is JSON, a Python literal or else text.",
        "",
        "## Recipes",
        "",
        *(f"- `{name}`: {' '.join((recipe.__doc__ or '').split())}" for name, recipe in RECIPES.items()),
    ]
    section = None
    for key, field in settings().items():
        head, _, leaf = key.rpartition(".")
        if head != section:
            section = head
            model = RunConfig.model_fields[head].annotation if head else RunConfig
            lines += ["", f"## {head or 'run'}", "", f"{' '.join((getattr(model, '__doc__', '') or '').split())}", ""]
            lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        default = "required" if field.is_required() else f"`{json.dumps(field.get_default())}`"
        lines.append(
            f"| `{leaf}` | {_type_text(field)} | {default} | {(field.description or '').replace('|', chr(92) + '|')} |"
        )
    lines += ["", "## Rules over several settings", "", "Each is one function in `grpo_lib/rules.py`.", ""]
    lines += [f"- {rule.__name__.replace('_', ' ')}" for rule in RULES]
    return "\n".join(lines) + "\n"


def _type_text(field: Any) -> str:
    """A field's type and limits, e.g. ``int, >= 1`` or ``"a" or "b"``."""
    choices = getattr(field.annotation, "__args__", ())
    if choices and all(isinstance(choice, str) for choice in choices):
        return " or ".join(f"`{choice}`" for choice in choices)
    name = getattr(field.annotation, "__name__", "") if not choices else str(field.annotation)
    symbols = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    limits = [
        f"{symbol} {value}"
        for limit in field.metadata
        for attribute, symbol in symbols.items()
        if (value := getattr(limit, attribute, None)) is not None
    ]
    return ", ".join([name.replace("|", "or").replace("None", "null"), *limits])


if __name__ == "__main__":
    sys.exit(main())
