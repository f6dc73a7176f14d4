"""Everything that is claimed about one GPU, measured by one command in at most eight minutes.

    python benchmarks/gpu.py --out results.json --table results.md

Each part is a script of its own and can be run alone. Here they take the card one after the other: while one measures,
the next one imports, and waits until the card's memory is free. A part that fails or runs over its limit is a row that
says so, and the others go on. The JSON holds each part's own, the versions, the commands and every target with its
value. It is written anew after every part; `--merge` takes the parts that are not run from such a file.

    a trainers   forward, backward and optimiser step of a pack, by trainer    random weights, made on the card
    b engine     rollout tokens/s against the decode floor                     a random model's folder
    c sync       certified weight push against a device copy                   the same
    d step       one step of the whole loop, with spans                        the same
    e parity     log-probabilities of engine and trainers                      trained weights
    f trl        TRL's GRPOTrainer on the work of d                            a random model's folder
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu_parts import Part, Results, Runner, environment, failures, left_out, said

_MODEL_SHAPE, _TRAINED = "qwen3_4b", "cached:smollm2_135m"
_PACKAGES = (
    "torch", "triton", "transformers", "vllm", "ray", "ai2-olmo-core", "deepspeed", "trl", "accelerate", "datasets",
)  # fmt: skip


# The limits add up to more than eight minutes, what the parts are expected to take (in brackets) to less.
PARTS = (
    Part(
        key="a",
        name="trainers",
        title="forward, backward and optimiser step of a pack",
        script="gpu_trainers.py",
        needs=None,
        arguments=("--repeats", "3"),
        limit_s=170,  # 136
    ),
    Part(
        key="b",
        name="engine",
        title="rollouts against the decode floor",
        script="gpu_engine.py",
        needs="random",
        arguments=("--rounds", "3"),
        limit_s=95,  # 78
    ),
    Part(
        key="c",
        name="sync",
        title="the certified weight push",
        script="gpu_sync.py",
        needs="random",
        limit_s=85,  # 65
    ),
    Part(
        key="d",
        name="step",
        title="one step of the whole loop",
        script="gpu_step.py",
        needs="random",
        limit_s=100,  # 78
    ),
    Part(
        key="e",
        name="parity",
        title="log-probabilities of engine and trainers",
        script="gpu_parity.py",
        needs="trained",
        arguments=("--seconds", "80"),  # of each of its processes
        limit_s=90,  # 62
    ),
    Part(
        key="f",
        name="trl",
        title="TRL on the work of d",
        script="gpu_trl.py",
        needs="random",
        arguments=("--phases", "equal;mixed", "--steps", "2", "--seconds", "40"),
        limit_s=95,  # 60
    ),
)
HEADINGS = {part.name: f"{part.key} {part.name}: {part.title}" for part in PARTS}


# --- Targets --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A promise about one number. `value` raises `LookupError` where the parts that it reads measured nothing."""

    text: str
    value: Callable[[Results], float]
    limit: float
    at_most: bool
    show: str = ".3f"

    def judged(self, results: Results) -> dict[str, Any]:
        """Value, limit and whether it is met; `met` is None where it was not measured."""
        row: dict[str, Any] = {"target": self.text, "limit": self.limit, "at_most": self.at_most, "show": self.show}
        try:
            value = self.value(results)
        except LookupError as error:
            return {**row, "value": None, "met": None, "why": f"not measured: {error}"}
        return {**row, "value": value, "met": value <= self.limit if self.at_most else value >= self.limit}


def row_where(results: Results, part: str, **wanted: object) -> Mapping[str, Any]:
    """The row of a part that has these values.

    Raises:
        LookupError: there is none.
    """
    for row in results.get(part, {}).get("rows", ()):
        if "failed" not in row and all(row.get(key) == value for key, value in wanted.items()):
            return row
    raise LookupError(f"{part} has no row with {wanted}")


def summarised(results: Results, part: str, name: str) -> float:
    """A number of a part's summary; raises `LookupError` like `row_where`."""
    summary = results.get(part, {}).get("summary", {})
    if name not in summary:
        raise LookupError(f"{part} has no {name}")
    return summary[name]


def best_pack(results: Results, trainer: str, *, documents: int = 10, recomputed: bool | None = None) -> dict[str, Any]:
    """A trainer's fastest pack with so many documents; `recomputed` restricts to cases with or without checkpointing.

    Raises:
        LookupError: no case of that trainer came so far.
    """
    part = results.get("trainers", {})
    chosen = {
        case["name"]
        for case in part.get("cases", ())
        if case["trainer"] == trainer
        and recomputed in (None, bool(case["settings"].get("activation_checkpointing", False)))
    }
    packs = [
        pack
        for row in part.get("rows", ())
        if row["case"] in chosen
        for pack in row.get("packs", ())
        if pack["documents"] == documents
    ]
    if not packs:
        raise LookupError(f"no {trainer} case measured a pack of {documents} documents")
    return min(packs, key=lambda pack: pack["step_s"])


def step_ratio(results: Results, *, recomputed: bool | None = None) -> float:
    """How many times longer HF + DeepSpeed's step takes than OLMo-core's."""
    ours = best_pack(results, "olmo_core", recomputed=recomputed)
    return best_pack(results, "hf_deepspeed", recomputed=recomputed)["step_s"] / ours["step_s"]


def samples_ratio(results: Results, lengths: str) -> float:
    """Our samples/s over those of TRL at its best."""
    name = f"{lengths}_samples_per_s"
    return summarised(results, "step", name) / summarised(results, "trl", name)


TARGETS = (
    Target(
        text="OLMo-core, full step of a pack of 10,240 tokens, 10 documents, s",
        value=lambda found: best_pack(found, "olmo_core")["step_s"],
        limit=0.50,
        at_most=True,
    ),
    Target(
        text="the same, MFU of forward and backward",
        value=lambda found: best_pack(found, "olmo_core")["mfu_forward_backward"],
        limit=0.50,
        at_most=False,
    ),
    Target(
        text="the same, peak memory, GB",
        value=lambda found: best_pack(found, "olmo_core")["peak_gb"],
        limit=100,
        at_most=True,
        show=".1f",
    ),
    Target(text="HF + DeepSpeed / OLMo-core, both at their best", value=step_ratio, limit=2.0, at_most=False),
    Target(
        text="rollouts at 256 sequences, share of the decode floor",
        value=lambda found: row_where(found, "engine", sequences=256)["of_reads"],
        limit=0.70,
        at_most=False,
    ),
    Target(
        text="weight sync, transfer with checksums, s",
        value=lambda found: summarised(found, "sync", "transfer_s"),
        limit=0.15,
        at_most=True,
    ),
    Target(
        text="samples/s, ours / TRL at its best, equal lengths",
        value=lambda found: samples_ratio(found, "equal"),
        limit=2.0,
        at_most=False,
    ),
    Target(
        text="samples/s, ours / TRL at its best, mixed lengths",
        value=lambda found: samples_ratio(found, "mixed"),
        limit=2.0,
        at_most=False,
    ),
)
# Reported beside the targets; nothing is promised.
FIGURES: Mapping[str, Callable[[Results], float]] = {
    "HF + DeepSpeed / OLMo-core, both with every block recomputed": lambda found: step_ratio(found, recomputed=True),
    "HF + DeepSpeed / OLMo-core, both with nothing recomputed": lambda found: step_ratio(found, recomputed=False),
    "decode canary after a push, s": lambda found: summarised(found, "sync", "canary_s"),
    "device copy of the weights, s": lambda found: summarised(found, "sync", "copy_s"),
    "whole step, equal lengths, s": lambda found: summarised(found, "step", "equal_step_s"),
    "share of a step that no span claims": lambda found: summarised(found, "step", "equal_other_share"),
}


def judged_targets(results: Results) -> list[dict[str, Any]]:
    """Every target, those that parity states itself included, and the figures beside them."""
    rows = [target.judged(results) for target in TARGETS]
    for row in results.get("parity", {}).get("targets", ()):
        rows.append({"at_most": True, "show": ".4g", **row, "target": f"parity, {row['target']}"})  # noqa: PERF401
    if not results.get("parity", {}).get("targets"):
        rows.append({"target": "parity", "value": None, "met": None, "why": "not measured"})
    return rows


def figures(results: Results) -> dict[str, float | None]:
    """The numbers that nothing is promised about; None where they were not measured."""
    values: dict[str, float | None] = {}
    for text, value in FIGURES.items():
        try:
            values[text] = value(results)
        except LookupError:
            values[text] = None
    return values


# --- Models ---------------------------------------------------------------------------------------------------------


def random_model(folder: Path) -> subprocess.Popen[bytes]:
    """Begin to write the random model on CPU cores, which the first part leaves idle."""
    command = [sys.executable, "-m", "grpo_lib.cli", "make-model", "--like", _MODEL_SHAPE, "--device", "cpu"]
    with (folder / "model.log").open("wb") as log:
        return subprocess.Popen([*command, str(folder / "model")], stdout=log, stderr=log, env=environment())


def trained_model(given: Path | None) -> Path | str:
    """The folder, or why there is none."""
    from grpo_lib.data.models import resolve_model_path
    from grpo_lib.errors import GrpoError

    try:
        return given.resolve() if given else resolve_model_path(_TRAINED)
    except GrpoError as error:
        return str(error)


# --- Report ---------------------------------------------------------------------------------------------------------


def report(found: Mapping[str, Any]) -> str:
    """The targets, the figures beside them, and every part's own table, as Markdown."""
    lines = [
        f"# One {found['device']}, {found['date']}",
        "",
        f"`{found['command']}`, {found['seconds']:.0f} s. "
        + ", ".join(f"{name} {version}" for name, version in found["versions"].items()),
        "",
        "| target | asked | measured | |",
        "|---|---|---|---|",
    ]
    lines += [target_line(row) for row in found["targets"]]
    lines += ["", "| beside them | |", "|---|---|"]
    lines += [
        f"| {text} | {'not measured' if value is None else f'{value:.3f}'} |"
        for text, value in found["figures"].items()
    ]
    for name, part in found["parts"].items():
        lines += ["", f"## {HEADINGS[name]}", ""]
        if "command" in part:
            lines.append(f"`{part['command']}`, {part['card_s']:.0f} s of the card")
        if without_numbers := [*failures(part), *left_out(part)]:
            lines += ["", *(f"- {said(row)}" for row in without_numbers)]
        if part.get("table"):
            lines += ["", "```", part["table"], "```"]
    return "\n".join(lines) + "\n"


def target_line(row: Mapping[str, Any]) -> str:
    name = row["target"].replace("|", "\\|")  # which would begin a column
    if row["value"] is None:
        return f"| {name} | | {row['why']} | **not measured** |"
    bound = f"{'≤' if row['at_most'] else '≥'} {row['limit']:{row['show']}}"
    return f"| {name} | {bound} | {row['value']:{row['show']}} | {'met' if row['met'] else '**missed**'} |"


def versions() -> dict[str, str]:
    known = {dist.metadata["Name"].lower(): dist.version for dist in importlib.metadata.distributions()}
    return {"python": platform.python_version(), **{name: known[name] for name in _PACKAGES if name in known}}


def device() -> str:
    """The card by name, asked for in a process of its own: this one must hold none of its memory."""
    ask = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else 'machine without a GPU')"
    return subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()


def chosen_parts(only: str | None) -> list[Part]:
    """Parts by key or name.

    Raises:
        ValueError: there is no such part.
    """
    if not only:
        return list(PARTS)
    wanted = only.split(",")
    known = {name for part in PARTS for name in (part.key, part.name)}
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"no part {', '.join(unknown)}; there are {', '.join(f'{p.key} {p.name}' for p in PARTS)}")
    return [part for part in PARTS if part.key in wanted or part.name in wanted]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Where results go, anew after every part."""

    about: Mapping[str, Any]
    before: Results  # of parts that are not run now
    out: Path
    table: Path | None
    began: float

    def write(self, results: Results) -> str:
        """The JSON and the table, which is returned."""
        parts = {part.name: {**self.before, **results}.get(part.name) for part in PARTS}
        measured = {name: result for name, result in parts.items() if result is not None}
        found: dict[str, Any] = {
            **self.about,
            "seconds": time.monotonic() - self.began,
            "parts": measured,
            "targets": judged_targets(measured),
            "figures": figures(measured),
        }
        text = report(found)
        for path, content in ((self.out, json.dumps(found, indent=1)), (self.table, text)):
            if path is not None:
                partial = path.with_name(f".{path.name}")
                partial.write_text(content)
                partial.rename(path)
        return text


def about() -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["python", "benchmarks/gpu.py", *sys.argv[1:]]),
        "versions": versions(),
        "device": device(),
        "cpus": os.cpu_count(),
    }


def run_parts(parts: Sequence[Part], arguments: argparse.Namespace, folder: Path, kept: Report) -> Results:
    """Models, then parts."""
    needs = {part.needs for part in parts}
    models: dict[str, Path | str] = {"trained": trained_model(arguments.smollm)} if "trained" in needs else {}
    runner = Runner(folder, models, seconds=arguments.seconds, keep=kept.write)
    if "random" in needs:
        models["random"] = arguments.model.resolve() if arguments.model else folder / "model"
    if "random" in needs and not arguments.model:
        making = random_model(folder)
        runner.run([part for part in parts if part.needs is None])
        if making.wait() != 0:
            models["random"] = f"make-model failed: {(folder / 'model.log').read_text(errors='replace')[-1000:]}"
    runner.run([part for part in parts if part.name not in runner.results])
    return runner.results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="JSON with every number")
    parser.add_argument("--table", type=Path, help="Markdown with the targets and every part's table")
    parser.add_argument("--only", help="parts by letter or name, separated by commas")
    parser.add_argument("--merge", type=Path, help="JSON of an earlier command, for the parts that are not run now")
    parser.add_argument("--parts-dir", type=Path, help="keep each part's JSON, output and log in this folder")
    parser.add_argument(
        "--model", type=Path, help=f"random model's folder; one like {_MODEL_SHAPE} is made when absent"
    )
    parser.add_argument("--smollm", type=Path, help=f"trained model's folder; {_TRAINED} when absent")
    parser.add_argument("--seconds", type=float, default=480, help="limit of all parts together")
    arguments = parser.parse_args()
    try:
        parts = chosen_parts(arguments.only)
    except ValueError as error:
        parser.error(str(error))
    began = time.monotonic()
    before = json.loads(arguments.merge.read_text())["parts"] if arguments.merge else {}
    kept = Report(about=about(), before=before, out=arguments.out, table=arguments.table, began=began)
    with ExitStack() as stack:
        folder = arguments.parts_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu_")))
        folder.mkdir(parents=True, exist_ok=True)
        results = run_parts(parts, arguments, folder.resolve(), kept)
    print(kept.write(results))
    return int(any(failures(result) for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
