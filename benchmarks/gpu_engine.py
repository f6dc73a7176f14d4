"""Rollout tokens per second of one engine on one GPU, beside the least time that its steps could take.

    python benchmarks/gpu_engine.py --model DIR --out engine.json

The engine starts in this process with the options of a run. Batches of all sizes alternate; medians are of the rounds.
All sequences of a batch have a prompt of their own and end at the same length, so that every step decodes all of them.
Two floors of a step: *reads*, the weights and the sequences' keys and values through the card's memory once; and
*reads and products*, where the weights' products may take longer than reading the weights, which they do in large
batches. The second is the harder bound of the two. Neither counts sampling, norms or the host.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from card import product_tflops, the_card

from grpo_lib.config import RunConfig, resolve
from grpo_lib.data.models import ModelFacts, inspect_model
from grpo_lib.derived import kv_bytes_per_token
from grpo_lib.stages.live import engine_factory
from grpo_lib.types import GenerationRequest, SamplingParams

_SIZES = (64, 128, 256, 512)
_WAIT_S = 60.0
_SETTINGS = (
    "model.dtype=bfloat16", "weight_sync.backend=ipc", "trainer.num_ranks=1", "runtime.gpus_per_rank=0.5",
    "runtime.gpus_per_engine=0.5", "rollout.gpu_memory_share=0.5", "runtime.threads_per_process=4",
    "parity.max_abs=1", "weight_sync.canary_tolerance=1",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What the floors are computed from; the defaults are those of one H200."""

    bytes_per_s: float  # memory
    flops_per_s: float  # large bfloat16 products


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Milliseconds of a median step; a batch of that size cannot be decoded faster."""

    reads_ms: float
    reads_and_products_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One size of batch."""

    sequences: int
    tokens_per_s: float  # median of the rounds, prompts and admission included
    slowest: float
    fastest: float
    step_ms: float  # sequences / tokens_per_s
    floor: Floor

    @property
    def of_reads(self) -> float:
        return self.floor.reads_ms / self.step_ms

    @property
    def of_reads_and_products(self) -> float:
        return self.floor.reads_and_products_ms / self.step_ms


def floor_of(
    facts: ModelFacts, kv_bytes: int, card: Card, *, sequences: int, prompt_tokens: int, new_tokens: int
) -> Floor:
    """The step in the middle: every sequence has its prompt and half of its new tokens."""
    # Each weight is read once and multiplied once; of untied embeddings only single rows are.
    weights = facts.num_parameters - (0 if facts.tied_embeddings else facts.vocab_size * facts.hidden_size)
    reads = 2 * weights / card.bytes_per_s
    products = 2 * weights * sequences / card.flops_per_s
    keys_and_values = kv_bytes * sequences * (prompt_tokens + new_tokens / 2) / card.bytes_per_s
    return Floor(
        reads_ms=1e3 * (reads + keys_and_values), reads_and_products_ms=1e3 * (max(reads, products) + keys_and_values)
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
    config: RunConfig, facts: ModelFacts, factory: Callable[[], Any], options: argparse.Namespace, card: Card
) -> dict[str, Any]:
    started = time.perf_counter()
    engine = factory()
    start_s = time.perf_counter() - started
    rng = np.random.default_rng(0)
    seconds: dict[int, list[float]] = {count: [] for count in options.sizes}
    try:
        with the_card(options.lock):
            before = product_tflops()
            for count in options.sizes:
                seconds_of(engine, requests_of(config, facts, f"warm{count}", count, rng))
            for round_ in range(options.rounds):
                for count in options.sizes:
                    batch = requests_of(config, facts, f"{round_}.{count}", count, rng)
                    seconds[count].append(seconds_of(engine, batch))
            after = product_tflops()
    finally:
        engine.close()
    rows = [row_of(config, facts, count, seconds[count], card) for count in options.sizes]
    return {
        "model": str(options.model),
        "prompt_tokens": config.data.max_prompt_tokens,
        "new_tokens": config.rollout.max_tokens,
        "fp32_head": config.model.fp32_head,
        "start_s": start_s,
        "product_tflops": [before, after],
        "card": asdict(card),
        "rows": [
            asdict(row) | {"of_reads": row.of_reads, "of_reads_and_products": row.of_reads_and_products} for row in rows
        ],
        "seconds": {str(count): values for count, values in seconds.items()},
    }


def row_of(config: RunConfig, facts: ModelFacts, count: int, seconds: Sequence[float], card: Card) -> Row:
    rates = [count * config.rollout.max_tokens / value for value in seconds]
    middle = statistics.median(rates)
    floor = floor_of(
        facts,
        kv_bytes_per_token(config, facts),
        card,
        sequences=count,
        prompt_tokens=config.data.max_prompt_tokens,
        new_tokens=config.rollout.max_tokens,
    )
    return Row(
        sequences=count,
        tokens_per_s=middle,
        slowest=min(rates),
        fastest=max(rates),
        step_ms=1e3 * count / middle,
        floor=floor,
    )


def show(result: dict[str, Any]) -> None:
    print("sequences   tokens/s (slowest … fastest)      step    of reads   of reads and products")
    for row in result["rows"]:
        floor = row["floor"]
        print(
            f"{row['sequences']:9d} {row['tokens_per_s']:10,.0f} ({row['slowest']:,.0f} … {row['fastest']:,.0f})"
            f" {row['step_ms']:9.2f} ms {row['of_reads']:6.1%} of {floor['reads_ms']:.2f}"
            f" {row['of_reads_and_products']:6.1%} of {floor['reads_and_products_ms']:.2f} ms"
        )
    print(f"start {result['start_s']:.1f} s; a large product before and after: {result['product_tflops']} TFLOP/s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--out", type=Path, default=Path("gpu_engine.json"), help="JSON with every number")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(_SIZES), help="sequences decoded together")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--tb-per-s", type=float, default=4.8, help="memory bandwidth of the card")
    parser.add_argument("--tflops", type=float, default=790.0, help="its speed in large bfloat16 products")
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
            f"rollout.max_num_seqs={max(options.sizes)}",
            f"trainer.pack_length={2 * (options.prompt_tokens + options.new_tokens)}",
            *options.overrides,
        ],
    )
    facts = inspect_model(options.model)
    card = Card(bytes_per_s=options.tb_per_s * 1e12, flops_per_s=options.tflops * 1e12)
    result = measure(config, facts, engine_factory(config, options.model, policy_version=0, index=0), options, card)
    options.out.write_text(json.dumps(result, indent=1))
    show(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
