"""Rollout tokens per second of one engine on one GPU, beside the least time that its steps could take.

    python benchmarks/gpu_engine.py --model DIR --out engine.json

The engine starts in this process with the options of a run. Batches of all sizes alternate; medians are of the rounds.
All sequences of a batch have a prompt of their own and end at the same length, so that every step decodes all of them.
Two floors of a step: *reads*, the weights and the sequences' keys and values through the card's memory once; and
*products*, the products with all weights as long as they take on this card for so many sequences, measured, and the
keys and values once. In large batches products take longer than reading the weights, so that the second is the harder
bound. Neither counts sampling, norms or the host.

What keeps a step from its floor is measured last, in a batch of its own: the GPU's time by kind of kernel and the
host's by part of the step. If that fails, it is a row that says so, and the rest stands.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from card import product_tflops, the_card
from decode_steps import StepProbe, matrices_of, products_ms

from grpo_lib.config import RunConfig, resolve
from grpo_lib.data.models import ModelFacts, inspect_model
from grpo_lib.derived import kv_bytes_per_token
from grpo_lib.rollout.options import import_architecture, prepare_process
from grpo_lib.stages.live import engine_factory
from grpo_lib.types import GenerationRequest, SamplingParams

_SIZES = (64, 128, 256, 512)
_WAIT_S = 60.0
_WARM_TOKENS = 16
_PROBED_STEPS = 20
_SETTINGS = (
    "model.dtype=bfloat16", "weight_sync.backend=ipc", "trainer.num_ranks=1", "runtime.gpus_per_rank=0.5",
    "runtime.gpus_per_engine=0.5", "rollout.gpu_memory_share=0.4", "runtime.threads_per_process=4",
    "parity.max_abs=1", "weight_sync.canary_tolerance=1",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Milliseconds of a median step; a batch of that size cannot be decoded faster."""

    reads_ms: float
    keys_and_values_ms: float  # of it
    products_ms: float | None  # None where the products were not measured

    @property
    def products_and_reads_ms(self) -> float | None:
        return None if self.products_ms is None else self.products_ms + self.keys_and_values_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One size of batch."""

    sequences: int
    tokens_per_s: float  # median of the rounds, prompts and admission included
    slowest: float
    fastest: float
    step_ms: float  # sequences / tokens_per_s
    floor: Floor

    def as_json(self) -> dict[str, Any]:
        bound = self.floor.products_and_reads_ms
        return asdict(self) | {
            "of_reads": self.floor.reads_ms / self.step_ms,
            "of_products_and_reads": None if bound is None else bound / self.step_ms,
        }


def floor_of(
    facts: ModelFacts,
    kv_bytes: int,
    bytes_per_s: float,
    *,
    sequences: int,
    prompt_tokens: int,
    new_tokens: int,
    products: float | None,
) -> Floor:
    """The step in the middle: every sequence has its prompt and half of its new tokens."""
    # Each weight is read once; of untied embeddings only single rows are.
    weights = facts.num_parameters - (0 if facts.tied_embeddings else facts.vocab_size * facts.hidden_size)
    keys_and_values = kv_bytes * sequences * (prompt_tokens + new_tokens / 2) / bytes_per_s
    return Floor(
        reads_ms=1e3 * (2 * weights / bytes_per_s + keys_and_values),
        keys_and_values_ms=1e3 * keys_and_values,
        products_ms=products,
    )


def requests_of(
    config: RunConfig, facts: ModelFacts, tag: str, count: int, rng: np.random.Generator
) -> list[GenerationRequest]:
    prompts = rng.integers(0, facts.vocab_size, (count, config.data.max_prompt_tokens)).tolist()
    sampling = SamplingParams(temperature=1.0, max_tokens=config.rollout.max_tokens, stop_token_ids=())
    return [
        GenerationRequest(request_id=f"{tag}/{i}", prompt_token_ids=tuple(prompt), sampling=sampling, seed=i)
        for i, prompt in enumerate(prompts)
    ]


def seconds_of(engine: Any, requests: Sequence[GenerationRequest]) -> float:
    """From submitting a batch to its last completion."""
    started = time.perf_counter()
    engine.submit(requests)
    tokens, left = 0, len(requests)
    while left:
        polled = engine.poll(_WAIT_S)
        if not polled:
            raise TimeoutError(f"{left} of {len(requests)} completions have not arrived within {_WAIT_S:g} s")
        tokens += sum(len(completion.token_ids) for completion in polled)
        left -= len(polled)
    seconds = time.perf_counter() - started
    expected = sum(request.sampling.max_tokens for request in requests)
    if tokens != expected:
        raise RuntimeError(f"{tokens} tokens instead of {expected}: a sequence ended early")
    return seconds


def measure(
    config: RunConfig, facts: ModelFacts, factory: Callable[[], Any], options: argparse.Namespace
) -> dict[str, Any]:
    seconds: dict[int, list[float]] = {count: [] for count in options.sizes}
    failed: list[dict[str, str]] = []
    import_engine(config, options.model)
    with the_card(options.lock):
        started = time.perf_counter()
        engine = factory()
        start_s = time.perf_counter() - started
        try:
            speed = [attempt("speed before", product_tflops, failed)] if on_gpu() else []
            attempt("rounds", lambda: run_rounds(engine, config, facts, options, seconds), failed)
            speed += [attempt("speed after", product_tflops, failed)] if on_gpu() else []
            found = {"start_s": start_s, "product_tflops": speed}
            # Written before the rest begins: it stands whatever becomes of the process.
            result = report(config, facts, options, seconds, failed) | found
            options.out.write_text(json.dumps(result | {"table": table(result)}, indent=1))
            products: dict[int, float] | None = attempt(
                "products", lambda: measured_products(engine, options.sizes), failed
            )
            batch = requests_of(config, facts, "probe", options.probed, np.random.default_rng(1))
            steps = attempt("steps", lambda: probed(engine, batch), failed)
        finally:
            engine.close()
    return report(config, facts, options, seconds, failed, products or {}) | found | {"probed_steps": steps}


def report(
    config: RunConfig,
    facts: ModelFacts,
    options: argparse.Namespace,
    seconds: dict[int, list[float]],
    failed: Sequence[dict[str, str]],
    products: Mapping[int, float] = MappingProxyType({}),
) -> dict[str, Any]:
    bytes_per_s = options.tb_per_s * 1e12
    rows = [
        row_of(config, facts, count, values, bytes_per_s, products.get(count))
        for count, values in seconds.items()
        if values
    ]
    return {
        "model": str(options.model),
        "prompt_tokens": config.data.max_prompt_tokens,
        "new_tokens": config.rollout.max_tokens,
        "fp32_head": config.model.fp32_head,
        "bytes_per_s": bytes_per_s,
        "rows": [*(row.as_json() for row in rows), *failed],
        "seconds": {str(count): values for count, values in seconds.items()},
        "probed_sequences": options.probed,
    }


def run_rounds(
    engine: Any, config: RunConfig, facts: ModelFacts, options: argparse.Namespace, seconds: dict[int, list[float]]
) -> None:
    """Fill `seconds` in place, so that what was measured before a failure stays."""
    rng = np.random.default_rng(0)
    for count in options.sizes:
        seconds_of(engine, shortened(requests_of(config, facts, f"warm{count}", count, rng), _WARM_TOKENS))
    for round_ in range(options.rounds):
        for count in options.sizes:
            batch = requests_of(config, facts, f"{round_}.{count}", count, rng)
            seconds[count].append(seconds_of(engine, batch))


def import_engine(config: RunConfig, model: Path) -> None:
    """Import what the engine will, which takes none of the card's memory."""
    prepare_process(config.runtime.threads_per_process)
    from vllm.engine.arg_utils import EngineArgs  # noqa: F401
    from vllm.v1.engine.llm_engine import LLMEngine  # noqa: F401

    import_architecture(model, config.rollout)
    if on_gpu():
        from vllm.v1.worker import gpu_worker  # noqa: F401
        from vllm.v1.worker.gpu import model_runner  # noqa: F401


def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def shortened(requests: Sequence[GenerationRequest], tokens: int) -> list[GenerationRequest]:
    """The same requests with at most so many new tokens."""
    return [
        replace(
            request,
            sampling=replace(request.sampling, max_tokens=min(tokens, request.sampling.max_tokens)),
        )
        for request in requests
    ]


def attempt(case: str, work: Callable[[], Any], failed: list[dict[str, str]]) -> Any:
    """The result, or None after adding to `failed`: one part that fails does not cost what the others measured."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 the measured numbers stand without it
        failed.append({"case": case, "failed": repr(error)})
        return None


def measured_products(engine: Any, sizes: Sequence[int]) -> dict[int, float]:
    matrices = matrices_of(engine)
    return {count: products_ms(matrices, count) for count in sizes}


def probed(engine: Any, requests: Sequence[GenerationRequest]) -> dict[str, Any]:
    """The steps about the middle of a batch, of which the floors speak as well."""
    tokens = requests[0].sampling.max_tokens
    steps = min(_PROBED_STEPS, tokens // 4)
    with StepProbe(engine._vllm, first=tokens // 2 - steps, steps=steps) as probe:
        seconds_of(engine, requests)
    return probe.result()


def row_of(
    config: RunConfig,
    facts: ModelFacts,
    count: int,
    seconds: Sequence[float],
    bytes_per_s: float,
    products: float | None,
) -> Row:
    rates = [count * config.rollout.max_tokens / value for value in seconds]
    middle = statistics.median(rates)
    floor = floor_of(
        facts,
        kv_bytes_per_token(config, facts),
        bytes_per_s,
        sequences=count,
        prompt_tokens=config.data.max_prompt_tokens,
        new_tokens=config.rollout.max_tokens,
        products=products,
    )
    return Row(
        sequences=count,
        tokens_per_s=middle,
        slowest=min(rates),
        fastest=max(rates),
        step_ms=1e3 * count / middle,
        floor=floor,
    )


def table(result: dict[str, Any]) -> str:
    """What was measured, without the program's own output."""
    lines = ["sequences   tokens/s (slowest … fastest)       step     of reads       of products and reads"]
    for row in result["rows"]:
        if "failed" in row:
            lines.append(f"{row['case']} FAILED: {row['failed']}")
            continue
        floor = row["floor"]
        line = (
            f"{row['sequences']:9d} {row['tokens_per_s']:10,.0f} ({row['slowest']:,.0f} … {row['fastest']:,.0f})"
            f" {row['step_ms']:9.2f} ms {row['of_reads']:6.1%} of {floor['reads_ms']:.2f}"
        )
        if row["of_products_and_reads"] is not None:
            line += (
                f" {row['of_products_and_reads']:6.1%} of {floor['products_ms']:.2f}"
                f" + {floor['keys_and_values_ms']:.2f} ms"
            )
        lines.append(line)
    speeds = " → ".join(f"{speed:.0f}" for speed in result["product_tflops"] if speed is not None)
    lines.append(f"start {result['start_s']:.1f} s; a large product before and after: {speeds or 'no'} TFLOP/s")
    if steps := result.get("probed_steps"):
        lines.append(
            f"a step of {result['probed_sequences']} sequences: {steps['wall_ms']:.2f} ms,"
            f" of which the device works {steps['busy_ms']:.2f} ms in {steps['kernels_per_step']:.0f} kernels"
        )
        lines.append("  device, ms: " + ", ".join(f"{kind} {ms:.2f}" for kind, ms in steps["kind_ms"].items()))
        lines.append("  host, ms:   " + ", ".join(f"{part} {ms:.2f}" for part, ms in steps["host_ms"].items()))
        lines += [
            f"  {kernel['ms']:7.3f} ms {kernel['per_step']:6.1f} x {kernel['kind']:<20} {kernel['name'][:80]}"
            for kernel in steps["longest"]
        ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--out", type=Path, default=Path("gpu_engine.json"), help="JSON with every number")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(_SIZES), help="sequences decoded together")
    parser.add_argument("--probed", type=int, default=256, help="sequences of the batch whose steps are taken apart")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--tb-per-s", type=float, default=4.8, help="memory bandwidth of the card")
    parser.add_argument("--lock", type=Path, help="file lock of the card; the script waits for it")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY.PATH=VALUE")
    options = parser.parse_args()
    config = resolve(
        "embedded_addition",
        [
            *_SETTINGS,
            f"model.path={options.model}",
            f"data.max_prompt_tokens={options.prompt_tokens}",
            f"rollout.max_tokens={options.new_tokens}",
            f"rollout.max_num_seqs={max(*options.sizes, options.probed)}",
            f"trainer.pack_length={2 * (options.prompt_tokens + options.new_tokens)}",
            *options.overrides,
        ],
    )
    facts = inspect_model(options.model)
    result = measure(config, facts, engine_factory(config, options.model, policy_version=0, index=0), options)
    result["table"] = table(result)
    options.out.write_text(json.dumps(result, indent=1))
    print(result["table"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
