"""One full GRPO step end to end on one GPU: rollouts, verdicts, training, certified weight sync, storage, with spans.

    python benchmarks/gpu_step.py --model DIR --out step.json

The parts are those of a real run: Ray, one vLLM engine and one trainer rank on the same card, weights through CUDA
IPC, verifiers in their own process, rollouts written to the store. What `fit` does besides is left out: data
preparation, and the checkpoint after the last step. `grpo_work` says what every step generates and trains, first with
all completions equally long, then with mixed lengths. A step counts once the steps before it have compiled and filled
caches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import grpo_work
from card import product_tflops, the_card
from grpo_work import LEARNING_RATE, VERIFIER, Work, prompts_of, spelled
from progress import actors_watched, say

from grpo_lib import loop
from grpo_lib.config import RunConfig, resolve
from grpo_lib.data.chat import load_tokenizer
from grpo_lib.data.order import PromptStream
from grpo_lib.interfaces import RolloutEngine
from grpo_lib.loop import StepRecord
from grpo_lib.pipeline import RolloutPipeline
from grpo_lib.ray_runtime.engine_group import EngineGroup
from grpo_lib.stages.live import live_run
from grpo_lib.stages.recorder import DiskRecorder
from grpo_lib.stages.run_paths import RunPaths
from grpo_lib.timing import SPANS
from grpo_lib.types import Completion, GenerationRequest
from grpo_lib.verifiers.pool import ProcessVerifierPool


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Steps of one kind of work; the first ones are not counted."""

    name: str
    work: Work
    warm: int
    steps: int


def phases_of(*, steps: int, mixed_steps: int, work: Work) -> list[Phase]:
    """Equal lengths, then mixed ones with twice the limit, which gives about as many tokens."""
    mixed = replace(work, mixed=True, max_tokens=2 * work.max_tokens)
    phases = [
        Phase(name="equal", work=work, warm=2, steps=steps),
        Phase(name="mixed", work=mixed, warm=1, steps=mixed_steps),
    ]
    return [phase for phase in phases if phase.steps]


class GivenLengths:
    """The engines, with the completion length of each sample set by the phase that the step belongs to."""

    def __init__(self, engines: EngineGroup, phases: Sequence[Phase]) -> None:
        self._engines = engines
        self._phases = [phase for phase in phases for _ in range(phase.warm + phase.steps)]
        self._lengths: tuple[int, ...] = ()

    def begin_step(self, step: int) -> None:
        """Called with the number of the step about to start, from 1."""
        self._lengths = self._phases[step - 1].work.lengths

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._engines.submit(
            [
                replace(request, sampling=replace(request.sampling, max_tokens=length))
                for request, length in zip(requests, self._lengths, strict=True)
            ]
        )

    def poll(self, timeout_s: float) -> list[Completion]:
        return self._engines.poll(timeout_s)


class StepRecorder(DiskRecorder):
    """The run's own recorder without checkpoints, which are no part of every step."""

    def checkpoint(self, step: int, prompt_state: dict[str, int], empty_steps: int) -> None:
        pass


def step_config(model: Path, root: Path, phases: Sequence[Phase], overrides: Sequence[str]) -> RunConfig:
    """A run on one card with a trainer and an engine that share it; `overrides` come last."""
    work = phases[0].work
    mine = {
        "model.path": str(model),
        "data.num_shots": 0,
        "data.max_prompt_tokens": work.prompt_tokens,
        "rollout.group_size": work.group_size,
        "rollout.max_tokens": max(phase.work.max_tokens for phase in phases),
        "rollout.max_num_seqs": work.num_samples,
        "rollout.stop_at": "end_of_text",
        "rollout.gpu_memory_share": 0.14,  # enough for one step; packs without recomputation take the rest
        "trainer.learning_rate": LEARNING_RATE,
        "trainer.compile": True,
        "trainer.logprob_recompute": False,
        "loop.prompts_per_step": work.num_prompts,
        "loop.steps": sum(phase.warm + phase.steps for phase in phases),
        "weight_sync.canary_tolerance": 5.0,  # random weights are as sharp as trained ones, and less smooth
        "storage.root": str(root),
        "runtime.object_store_mib": 1024,
    }
    given = {override.partition("=")[0] for override in overrides}
    own = [f"{key}={json.dumps(value)}" for key, value in mine.items() if key not in given]
    return resolve("smollm2_addition", [*own, *overrides])


def measure(
    config: RunConfig, model: Path, phases: Sequence[Phase], keep: Callable[[Sequence[dict[str, Any]]], object]
) -> dict[str, Any]:
    """All phases in one run of the loop; `keep` gets the rows of the phases that are over after each step."""
    started = time.perf_counter()
    tokenizer = load_tokenizer(model)
    prompts = prompts_of(tokenizer, phases[0].work, config.loop.steps * config.loop.prompts_per_step)
    paths = RunPaths.of(config, "step")
    records: list[StepRecord] = []
    begun: list[float] = []

    def on_step(record: StepRecord) -> None:
        records.append(record)
        say(f"step {record.step}: {record.metrics['time/step_s']:.3f} s")
        keep(phase_rows(phases, [record.metrics for record in records]))

    with (
        actors_watched(),
        ProcessVerifierPool(config.verifier, verifiers={VERIFIER: grpo_work.build}) as verifiers,
        live_run(config, model_path=model, canary_prompts=prompts, stop_token_ids=(), checkpoint=None) as live,
    ):
        say("trainer and engine are connected")
        engine = GivenLengths(live.engines, phases)
        recorder = StepRecorder(config, paths, trainer=live.trainer, on_step=on_step)
        pipeline = RolloutPipeline(
            config=config,
            engine=cast(RolloutEngine, engine),  # it submits and polls, which is all that a pipeline does with one
            prompts=PromptStream(prompts, config.seed),
            verifiers=verifiers,
            decode=spelled,
            stop_token_ids=(),
        )

        def before_step(step: int) -> None:
            begun.append(time.perf_counter())
            engine.begin_step(step)

        try:
            loop.fit(
                config,
                trainer=live.trainer,
                sync=live.sync,
                pipeline=pipeline,
                recorder=recorder,
                before_step=before_step,
            )
        finally:
            recorder.close()
    certificates = [json.loads(line) for line in paths.certificates.read_text().splitlines()]
    return {
        "start_s": begun[0] - started,
        "certificates_ok": len(certificates),  # the loop raises on the first that is not
        "transfer_s": statistics.median(row["transfer_s"] for row in certificates[1:]),
        "canary": certificates[0]["canary"],
        "steps": [{"step": record.step, **record.metrics} for record in records],
        "rows": phase_rows(phases, [record.metrics for record in records]),
    }


def phase_rows(phases: Sequence[Phase], metrics: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """Medians over the counted steps of each phase that is over, and what follows from them."""
    rows, start = [], 0
    for phase in phases:
        counted = metrics[start + phase.warm : start + phase.warm + phase.steps]
        start += phase.warm + phase.steps
        if len(metrics) < start:
            break
        if empty := [row for row in counted if not row["optim/applied"]]:
            seen = {name: value for name, value in empty[0].items() if name.startswith(("group/", "reward/"))}
            rows.append({"case": phase.name, "failed": f"{len(empty)} of {len(counted)} steps not applied: {seen}"})
            continue
        step_s = statistics.median(row["time/step_s"] for row in counted)
        spans = {name: statistics.median(row[f"time/{name}_s"] for row in counted) for name in (*SPANS, "other")}
        response_tokens = statistics.median(row["response/tokens"] for row in counted)
        assert response_tokens == sum(phase.work.lengths), "a completion did not have the length asked for"
        rows.append(
            {
                "case": phase.name,
                "work": asdict(phase.work),
                "steps": len(counted),
                "step_s": step_s,
                "step_min_s": min(row["time/step_s"] for row in counted),
                "step_max_s": max(row["time/step_s"] for row in counted),
                "samples_per_s": phase.work.num_samples / step_s,
                "tokens_per_s": phase.work.num_tokens / step_s,
                "trained_samples": statistics.median(row["batch/samples"] for row in counted),
                "trained_tokens": statistics.median(row["batch/real_tokens"] for row in counted),
                "padding_share": statistics.median(row["throughput/padding_share"] for row in counted),
                "rollout_tokens_per_s": response_tokens / spans["wait_for_rollouts"],
                "train_tokens_per_s": statistics.median(row["throughput/train_tokens_per_s"] for row in counted),
                "spans_s": spans,
                "other_share": spans["other"] / step_s,
            }
        )
    return rows


def summary_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Flat numbers by name, for the targets."""
    return {
        f"{row['case']}_{key}": row[key]
        for row in rows
        if "failed" not in row
        for key in ("step_s", "samples_per_s", "tokens_per_s", "other_share")
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line for each phase: the step and its spans in seconds."""
    names = [*SPANS, "other"]
    lines = [f"{'lengths':8} {'step':>7} {'samples/s':>9} " + " ".join(f"{name:>12.12}" for name in names)]
    lines += [
        f"{row['case']:8} {row['step_s']:7.3f} {row['samples_per_s']:9.1f} "
        + " ".join(f"{row['spans_s'][name]:12.3f}" for name in names)
        for row in rows
        if "failed" not in row
    ]
    return "\n".join(lines)


def add_work_arguments(parser: argparse.ArgumentParser) -> None:
    """What decides the work, alike for the systems that are compared."""
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a step")
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument(
        "--max-tokens", type=int, default=128, help="completion length; mixed lengths go up to twice it"
    )
    parser.add_argument("--steps", type=int, default=3, help="counted steps with equal lengths")
    parser.add_argument("--mixed-steps", type=int, default=2, help="counted steps with mixed lengths")


def work_of(arguments: argparse.Namespace) -> Work:
    return Work(
        num_prompts=arguments.prompts,
        group_size=arguments.group,
        prompt_tokens=arguments.prompt_tokens,
        max_tokens=arguments.max_tokens,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--out", type=Path, default=Path("gpu_step.json"), help="JSON with every number")
    parser.add_argument("--lock", type=Path, help="file lock of the card; the script waits for it")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="setting of the run")
    add_work_arguments(parser)
    arguments = parser.parse_args()
    phases = phases_of(steps=arguments.steps, mixed_steps=arguments.mixed_steps, work=work_of(arguments))
    result: dict[str, Any] = {"summary": {}, "rows": []}
    with tempfile.TemporaryDirectory(prefix="gpu_step_") as root, the_card(arguments.lock):
        try:
            config = step_config(arguments.model, Path(root), phases, arguments.set)
            result["config"] = config.model_dump(mode="json")
            result["product_tflops_before"] = product_tflops() if config.runtime.gpus_per_rank else None

            def keep(rows: Sequence[Mapping[str, Any]]) -> None:
                result.update(rows=rows, summary=summary_of(rows), table=table(rows))
                arguments.out.write_text(json.dumps(result))

            result.update(measure(config, arguments.model, phases, keep))
            keep(result["rows"])
            print(result["table"])
        except Exception as error:  # noqa: BLE001 process boundary: the failure is the row
            text = "".join(traceback.format_exception(error, limit=-8))
            failed = {"case": "step", "failed": f"{type(error).__name__}: {error}"[:300], "log": text[-3000:]}
            result["rows"] = [*result["rows"], failed]
            print(text, file=sys.stderr)
    arguments.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
