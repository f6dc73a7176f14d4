"""TRL's GRPOTrainer on the work of `gpu_step`: same model, prompts, completion lengths, rewards and optimiser steps.

    python benchmarks/gpu_trl.py --model DIR --out trl.json

TRL is no dependency of ours; `pip install trl datasets` beside the project's packages is enough. It runs as its manual
says is fastest on one card, with vLLM in the trainer's process, and keeps fp32 weights and moments with bfloat16
compute, as our trainer does. What decides its speed is tried setting by setting in one process, and its best counts:

- vLLM decodes with full graphs and does not detokenise, as our engine, which is faster than how TRL starts it;
- gradient checkpointing is off unless the phase says `recomputed`; TRL's default is on;
- `corrected` phases weigh tokens by the trainer's / the sampler's probability, as our loop does, for which TRL needs a
  forward pass more; it is TRL's default, and the other phases leave it out;
- `compiled` phases compile the decoder layers in place;
- micro-batches of 16 samples: at 32, mixed lengths do not fit beside the engine without checkpointing;
- one-pass AdamW, no logging, and no wait for a filter of losses that nobody logs.

Equal lengths are TRL's best case: it pads, so that mixed lengths cost it what they do not cost packs.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from card import product_tflops, the_card
from gpu_step import add_work_arguments, work_of
from grpo_work import LEARNING_RATE, Work, drawn_reward, prompts_of, spelled
from progress import say

from grpo_lib.config import resolve
from grpo_lib.data.chat import load_tokenizer
from grpo_lib.rollout.options import graph_sizes, import_architecture

# The first five are parts of preparing a batch, whose rest is `prepare`.
_PREPARING: tuple[str, ...] = ("weight_sync", "rollouts", "old_logprobs", "verify", "prepare")
_SPANS: tuple[str, ...] = (*_PREPARING, "forward_backward", "clip", "optim")
_places = itertools.count()  # of verdicts


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Steps under one setting: `warm` ones, counted ones, and where `explained` one more, timed span by span."""

    name: str
    work: Work
    steps: int
    warm: int = 1
    corrected: bool = False
    recomputed: bool = False
    compiled: bool = False
    explained: bool = True

    @property
    def all_steps(self) -> int:
        return self.warm + self.steps + self.explained


def phases_of(*, steps: int, mixed_steps: int, work: Work) -> list[Phase]:
    """Everything that may be worth knowing. Layers stay compiled, so those phases come last."""
    mixed = replace(work, mixed=True, max_tokens=2 * work.max_tokens)
    phases = [
        Phase(name="equal", work=work, steps=steps),
        Phase(name="mixed", work=mixed, steps=mixed_steps, explained=False),
        Phase(name="equal, corrected", work=work, steps=steps, corrected=True),
        Phase(name="equal, corrected, recomputed", work=work, steps=steps, corrected=True, recomputed=True),
        Phase(name="equal, compiled", work=work, steps=steps, warm=2, compiled=True, explained=False),
        Phase(name="mixed, compiled", work=mixed, steps=mixed_steps, warm=2, compiled=True, explained=False),
    ]
    return [phase for phase in phases if phase.steps]


class Clock:
    """Seconds of every step, and on the last step of a phase where they went."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize
        self.explaining = False
        self.spans: dict[str, float] = dict.fromkeys(_SPANS, 0.0)

    def watch(self, owner: Any, method: str, name: str, *, only_if: Callable[[], bool] = lambda: True) -> None:
        """Charge calls of a method to a span while a step is explained."""
        plain = getattr(owner, method)

        @functools.wraps(plain)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not (self.explaining and only_if()):
                return plain(*args, **kwargs)
            self._synchronize()
            started = time.perf_counter()
            result = plain(*args, **kwargs)
            self._synchronize()
            self.spans[name] += time.perf_counter() - started
            return result

        setattr(owner, method, timed)

    def explained(self, step_s: float) -> dict[str, float]:
        """Spans of the step that ends here; what nobody claimed is `other`.

        As they were watched, a training step encloses the preparation of its batch, and that encloses the rest.
        """
        whole, self.spans = self.spans, dict.fromkeys(_SPANS, 0.0)
        spans = dict(whole)
        spans["forward_backward"] -= whole["prepare"]
        spans["prepare"] -= sum(whole[name] for name in _PREPARING[:-1])
        return {**spans, "other": step_s - sum(spans.values())}


class PhaseRunner:
    """Switches TRL's trainer from phase to phase as steps end, and keeps the seconds."""

    def __init__(
        self,
        trainer: Any,
        phases: Sequence[Phase],
        clock: Clock,
        synchronize: Callable[[], None],
        *,
        limit_s: float,
        phase_ended: Callable[[], object],
    ) -> None:
        self._phase_ended = phase_ended
        self._trainer, self._phases, self._clock, self._synchronize = trainer, list(phases), clock, synchronize
        self._limit_s = limit_s
        self._index = self._done = 0
        self._began = self._last = 0.0
        self.seconds: list[list[float]] = [[] for _ in phases]
        self.spans: list[dict[str, float]] = [{} for _ in phases]

    @property
    def phase(self) -> Phase:
        return self._phases[self._index]

    def begin(self) -> None:
        self._enter()
        self._began = self._last = time.perf_counter()

    def step_ended(self) -> bool:
        """Whether there is time for another step."""
        self._synchronize()
        now = time.perf_counter()
        step_s, self._last = now - self._last, now
        self._done += 1
        phase = self.phase
        if self._clock.explaining:
            self.spans[self._index] = self._clock.explained(step_s)
        else:
            self.seconds[self._index].append(step_s)
        self._clock.explaining = phase.explained and self._done == phase.all_steps - 1
        if self._done == phase.all_steps:
            self._phase_ended()
            if self._index + 1 < len(self._phases):
                self._index, self._done = self._index + 1, 0
                self._enter()
            self._last = time.perf_counter()
        return now - self._began < self._limit_s

    def _enter(self) -> None:
        phase, model = self.phase, self._trainer.model
        self._trainer.vllm_importance_sampling_correction = phase.corrected
        if phase.recomputed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            model.gradient_checkpointing_disable()
        if phase.compiled:
            for layer in model.model.layers:
                layer.compile()

    def rows(self) -> list[dict[str, Any]]:
        """One for each phase; a phase that did not come to its end says so."""
        rows = []
        for phase, seconds, spans in zip(self._phases, self.seconds, self.spans, strict=True):
            counted = seconds[phase.warm :]
            row: dict[str, Any] = {"case": phase.name, "settings": asdict(phase), "steps": len(counted)}
            if len(counted) < phase.steps:
                rows.append({**row, "failed": f"ended after {len(seconds)} of {phase.all_steps} steps"})
                continue
            step_s = statistics.median(counted)
            rows.append(
                {
                    **row,
                    "step_s": step_s,
                    "step_min_s": min(counted),
                    "step_max_s": max(counted),
                    "warm_s": seconds[: phase.warm],
                    "samples_per_s": phase.work.num_samples / step_s,
                    "tokens_per_s": phase.work.num_tokens / step_s,
                    "spans_s": spans,
                }
            )
        return rows


def grpo_arguments(work: Work, phases: Sequence[Phase], *, batch: int, share: float, folder: str) -> dict[str, Any]:
    """Keyword arguments of TRL's GRPOConfig, numerically those of our recipe."""
    return {
        "output_dir": folder,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": work.num_samples // batch,
        "num_generations": work.group_size,
        "max_completion_length": max(phase.work.max_tokens for phase in phases),
        "max_steps": sum(phase.all_steps for phase in phases),
        "bf16": True,
        "gradient_checkpointing": False,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch_fused",
        "loss_type": "dapo",
        "epsilon": 0.2,
        "epsilon_high": 0.272,
        "beta": 0.0,
        "temperature": 1.0,
        "shuffle_dataset": False,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": share,
        "vllm_max_model_length": work.prompt_tokens + max(phase.work.max_tokens for phase in phases) + 1,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": 2.0,
        "generation_kwargs": {"ignore_eos": True, "detokenize": False},
        "logging_strategy": "no",
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def engine_options(work: Work, *, on_gpu: bool) -> dict[str, Any]:
    """What vLLM gets besides what TRL gives it: full decode graphs of the sizes of our engine, quick to start."""
    if not on_gpu:
        return {"enforce_eager": True}
    return {
        "enable_flashinfer_autotune": False,
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": graph_sizes(work.num_samples),
        },
    }


def reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """The reward of `grpo_work`, of the same text."""
    return [drawn_reward(spelled(ids), next(_places)) for ids in completion_ids]


def build_trainer(model: Path, phases: Sequence[Phase], arguments: argparse.Namespace, folder: str) -> Any:
    """GRPOTrainer with its engine."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    trl, vllm_generation = import_module("trl"), import_module("trl.generation.vllm_generation")
    work = phases[0].work
    on_gpu = torch.cuda.is_available()
    settings = grpo_arguments(work, phases, batch=arguments.batch, share=arguments.gpu_memory_share, folder=folder)
    engine = functools.partial(vllm_generation.LLM, **engine_options(work, on_gpu=on_gpu))
    setattr(vllm_generation, "LLM", engine)  # noqa: B010 TRL hands none of these options on
    if not on_gpu:  # to try the script itself
        settings |= {"use_cpu": True, "bf16": False}
    tokenizer = load_tokenizer(model)
    tokenizer.padding_side = "left"
    prompts = prompts_of(tokenizer, work, settings["max_steps"] * work.num_prompts)
    policy = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="sdpa", device_map={"": 0} if on_gpu else None
    )
    return trl.GRPOTrainer(
        model=policy,
        reward_funcs=reward,
        args=trl.GRPOConfig(**settings),
        train_dataset=Dataset.from_dict({"prompt": [prompt.text for prompt in prompts]}),
        processing_class=tokenizer,
    )


def set_lengths(trainer: Any, lengths: Callable[[], Sequence[int]]) -> None:
    """Every sample's completion has the length that the work gives it."""
    engine = trainer.vllm_generation.llm
    generate = engine.generate

    @functools.wraps(generate)
    def with_lengths(prompts: Sequence[Any], *, sampling_params: Any, **kwargs: Any) -> Any:
        each = [sampling_params.clone() for _ in prompts]
        for params, length in zip(each, lengths(), strict=True):
            params.max_tokens = length
        outputs = generate(prompts, sampling_params=each, **kwargs)
        got = [len(output.outputs[0].token_ids) for output in outputs]
        if got != list(lengths()):
            raise RuntimeError(f"completions of {got} tokens instead of the lengths asked for")
        return outputs

    engine.generate = with_lengths


def measure(
    model: Path, phases: Sequence[Phase], arguments: argparse.Namespace, folder: str, keep: Callable[[Any], object]
) -> dict[str, Any]:
    """All phases in one call of `train`; `keep` gets the rows after each."""
    import torch
    from transformers import TrainerCallback

    started = time.perf_counter()
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    trainer = build_trainer(model, phases, arguments, folder)
    clock = Clock(synchronize)
    runner = PhaseRunner(
        trainer, phases, clock, synchronize, limit_s=arguments.seconds, phase_ended=lambda: keep(runner.rows())
    )
    set_lengths(trainer, lambda: runner.phase.work.lengths)
    clock.watch(trainer, "training_step", "forward_backward")
    clock.watch(trainer, "_prepare_inputs", "prepare")
    clock.watch(trainer.vllm_generation, "sync_weights", "weight_sync")
    clock.watch(trainer.vllm_generation.llm, "generate", "rollouts")
    clock.watch(
        trainer,
        "_get_per_token_logps_and_entropies",
        "old_logprobs",
        only_if=lambda: not torch.is_grad_enabled(),
    )
    clock.watch(trainer, "_calculate_rewards", "verify")
    clock.watch(trainer.accelerator, "clip_grad_norm_", "clip")

    class Steps(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock.watch(trainer.optimizer, "step", "optim")
            say("training begins")
            runner.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            say(f"step {state.global_step}")
            control.should_training_stop |= not runner.step_ended()

    trainer.add_callback(Steps())
    result: dict[str, Any] = {"start_s": time.perf_counter() - started}
    try:
        trainer.train()
    except Exception as error:  # noqa: BLE001 process boundary: rows of the phases before it are still worth something
        result["log"] = "".join(traceback.format_exception(error, limit=-8))[-3000:]
        print(result["log"], file=sys.stderr)
    result["rows"] = runner.rows()
    result["train_s"] = time.perf_counter() - started - result["start_s"]
    if torch.cuda.is_available():
        result["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return result


def summary_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """TRL at its best, for each kind of lengths."""
    summary: dict[str, float] = {}
    for kind in ("equal", "mixed"):
        speeds = [row["samples_per_s"] for row in rows if row["case"].startswith(kind) and "failed" not in row]
        if speeds:
            summary[f"{kind}_samples_per_s"] = max(speeds)
    return summary


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line for each phase; spans are those of one step."""
    names = [*_SPANS, "other"]
    lines = [f"{'TRL':30} {'step':>7} {'samples/s':>9} " + " ".join(f"{name:>12.12}" for name in names)]
    for row in rows:
        if "failed" in row:
            lines.append(f"{row['case']:30} FAILED: {row['failed']}")
            continue
        spans = " ".join(f"{row['spans_s'][name]:12.3f}" for name in names if row["spans_s"])
        lines.append(f"{row['case']:30} {row['step_s']:7.3f} {row['samples_per_s']:9.1f} {spans}")
    return "\n".join(lines)


def prepare_process(model: Path) -> None:
    """Import what takes long, the model's class included, for which vLLM otherwise starts a process of its own.

    The variables are read when vLLM is imported.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # read when CUDA is first used
    for name in ("trl", "trl.generation.vllm_generation", "vllm.v1.engine.llm_engine"):
        import_module(name)
    import_architecture(model, resolve("embedded_addition").rollout)  # for its one engine of one part


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--out", type=Path, default=Path("gpu_trl.json"), help="JSON with every number")
    parser.add_argument("--lock", type=Path, help="file lock of the card; the script waits for it")
    parser.add_argument("--batch", type=int, default=16, help="samples of a forward and backward pass")
    parser.add_argument("--gpu-memory-share", type=float, default=0.14, help="of vLLM")
    parser.add_argument("--seconds", type=float, default=60, help="of training, after which no further step starts")
    parser.add_argument("--phases", help="their names, separated by semicolons; all when absent")
    add_work_arguments(parser)
    arguments = parser.parse_args()
    work = work_of(arguments)
    phases = phases_of(steps=arguments.steps, mixed_steps=arguments.mixed_steps, work=work)
    if arguments.phases:
        wanted = arguments.phases.split(";")
        if unknown := set(wanted) - {phase.name for phase in phases}:
            parser.error(f"no phases {unknown}; there are {[phase.name for phase in phases]}")
        phases = [phase for phase in phases if phase.name in wanted]
    result: dict[str, Any] = {"summary": {}, "rows": []}
    with tempfile.TemporaryDirectory(prefix="gpu_trl_") as folder:
        try:
            prepare_process(arguments.model)
            import torch

            result["versions"] = {name: version(name) for name in ("trl", "transformers", "accelerate", "datasets")}
            result["settings"] = grpo_arguments(
                work, phases, batch=arguments.batch, share=arguments.gpu_memory_share, folder="…"
            )
            result["engine_options"] = engine_options(work, on_gpu=torch.cuda.is_available())
            with the_card(arguments.lock):
                result["product_tflops_before"] = product_tflops() if torch.cuda.is_available() else None

                def keep(rows: Sequence[Mapping[str, Any]]) -> None:
                    result.update(rows=rows, summary=summary_of(rows), table=table(rows))
                    arguments.out.write_text(json.dumps(result))

                result.update(measure(arguments.model, phases, arguments, folder, keep))
            keep(result["rows"])
            print(result["table"])
        except Exception as error:  # noqa: BLE001 process boundary: the failure is the row
            text = "".join(traceback.format_exception(error, limit=-8))
            failed = {"case": "TRL", "failed": f"{type(error).__name__}: {error}"[:300], "log": text[-3000:]}
            result["rows"] = [*result["rows"], failed]
            print(text, file=sys.stderr)
    arguments.out.write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # vLLM and accelerate leave threads behind that wait for nothing


if __name__ == "__main__":
    main()
