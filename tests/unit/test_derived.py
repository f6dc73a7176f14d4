"""Derived quantities against figures worked by hand, and bounds against the packer itself."""

from dataclasses import replace

import numpy as np
import pytest

from grpo_lib.algo.packing import fit_rows
from grpo_lib.config import RunConfig, resolve
from grpo_lib.data.models import ModelFacts, inspect_model, resolve_model_path
from grpo_lib.derived import Bounds, derive, kv_bytes_per_token, model_problems, rank_memory

RECIPE = "embedded_addition"


SHIPPED = inspect_model(resolve_model_path("builtin:tiny_qwen3"))
TINY = replace(SHIPPED, num_parameters=220_000)  # a round number to calculate with
QWEN_4B = replace(
    SHIPPED,
    num_parameters=4_000_000_000,
    vocab_size=151_936,
    num_layers=36,
    hidden_size=2560,
    intermediate_size=9728,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position=40_960,
)


def embedded(*overrides: str) -> RunConfig:
    return resolve(RECIPE, overrides)


def test_counts_worked_by_hand() -> None:
    config = embedded("loop.steps=10", "loop.prompts_per_step=16", "rollout.group_size=16", "rollout.max_tokens=6")
    derived = derive(config, TINY)
    assert derived.samples_per_step == 256
    assert derived.samples_total == 2560
    assert derived.max_response_tokens_per_step == 1536
    assert derived.max_tokens_per_step == 256 * 22
    assert derived.epochs == 10 * 16 / 800
    assert derived.evaluation_samples == 2 * 150 * 49
    # 5 samples of 22 tokens fit a pack of 128; the shortest sample has two tokens, so 64 of them do.
    assert derived.packs_per_step == Bounds(low=4, high=52)
    assert derived.packs_per_rank == Bounds(low=2, high=26)
    assert derived.cpus == 2 * 0.5 + 1 * 1.0


def test_micro_batches_hold_several_packs() -> None:
    derived = derive(embedded("trainer.micro_batch_packs=5"), TINY)
    assert derived.micro_batches_per_rank == Bounds(low=1, high=6)


def test_epochs_of_files_are_not_known_yet() -> None:
    config = embedded("data.source=jsonl", "data.train_path=a", "data.heldout_path=b")
    assert derive(config, TINY).epochs is None


@pytest.mark.parametrize("seed", range(20))
def test_the_packer_stays_within_the_bounds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pack_length = int(rng.integers(30, 120))
    prompt, response = int(rng.integers(1, 15)), int(rng.integers(1, 15))
    config = embedded(
        f"trainer.pack_length={pack_length}",
        f"data.max_prompt_tokens={prompt}",
        f"rollout.max_tokens={response}",
        "loop.prompts_per_step=8",
    )
    bounds = derive(config, TINY).packs_per_step
    lengths = rng.integers(1, prompt + 1, 128) + rng.integers(1, response + 1, 128)
    assert bounds.low <= len(fit_rows(lengths.tolist(), pack_length)) <= bounds.high
    assert len(fit_rows([prompt + response] * 128, pack_length)) == bounds.high  # reached, so not merely safe


def test_rank_memory_of_a_large_model_worked_by_hand() -> None:
    config = RunConfig.model_validate(
        embedded().model_dump() | {"trainer": {"num_ranks": 4, "pack_length": 10_240, "micro_batch_packs": 1}}
    )
    memory = rank_memory(config, QWEN_4B)
    assert memory.parameters == memory.gradients == 4 * 1_000_000_000
    assert memory.optimizer == 8 * 1_000_000_000
    assert memory.logits == 3 * 4 * 1024 * 151_936
    # Korthikanti: s·b·h·(34 + 5·a·s/h) per layer at 2 bytes an activation; this configuration computes in fp32.
    per_layer = 10_240 * 2560 * (34 + 5 * 32 * 10_240 / 2560)
    assert memory.activations == pytest.approx(36 * per_layer * 2, rel=1e-12)
    assert memory.total == memory.device + memory.process


@pytest.mark.parametrize(
    ("stage", "parameters", "gradients", "optimizer"),
    [(0, 16, 16, 32), (1, 16 + 4, 16 + 4, 8), (2, 16 + 4, 8, 8), (3, 4 + 4, 8, 8)],
)
def test_rank_memory_by_zero_stage_worked_by_hand(stage: int, parameters: int, gradients: int, optimizer: int) -> None:
    """10^9 bytes a rank for 4 10^9 parameters over 4 ranks in fp32: 16 whole, 4 a shard."""
    memory = rank_memory(
        embedded("trainer.backend=hf_deepspeed", f"trainer.zero_stage={stage}", "trainer.num_ranks=4"), QWEN_4B
    )
    billions = [memory.parameters / 1e9, memory.gradients / 1e9, memory.optimizer / 1e9]
    assert billions == [parameters, gradients, optimizer]


def test_zero_2_computes_with_whole_bf16_weights() -> None:
    overrides = ["model.dtype=bfloat16", "weight_sync.canary_tolerance=0.1", "parity.max_abs=0.1"]
    memory = rank_memory(embedded("trainer.backend=hf_deepspeed", "trainer.num_ranks=4", *overrides), QWEN_4B)
    assert memory.parameters == 8_000_000_000 + 4_000_000_000


def test_recomputed_layers_keep_their_inputs_only() -> None:
    kept = rank_memory(embedded(), QWEN_4B).activations
    recomputed = rank_memory(embedded("trainer.activation_checkpointing=true"), QWEN_4B).activations
    assert recomputed == kept // 36 + 36 * 16 * 128 * 2560 * 4


def test_kv_bytes_of_known_models() -> None:
    """Keys and values x layers x heads x head_dim x bytes; 147 456 bytes a token is Qwen3-4B in bfloat16."""
    assert kv_bytes_per_token(embedded(), TINY) == 2 * 3 * 2 * 64 * 4
    bf16 = embedded("model.dtype=bfloat16", "weight_sync.canary_tolerance=0.1", "parity.max_abs=0.1")
    assert kv_bytes_per_token(bf16, QWEN_4B) == 147_456


def test_engines_and_ranks_on_gpus_leave_the_host_their_processes() -> None:
    on_cpu = derive(embedded(), QWEN_4B)
    gpu = embedded("runtime.gpus_per_rank=1", "runtime.gpus_per_engine=1", "weight_sync.backend=nccl")
    on_gpu = derive(gpu, QWEN_4B)
    assert on_cpu.host_memory_bytes - on_gpu.host_memory_bytes == (
        2 * on_cpu.rank_memory.device + on_cpu.engine_memory.device
    )
    assert on_gpu.kv_cache_tokens is None
    assert on_gpu.gpus == 3


def test_disk_grows_with_kept_checkpoints_and_steps() -> None:
    base = derive(embedded(), QWEN_4B)
    assert base.checkpoint_bytes == 48_000_000_000  # fp32 weights and two moments
    more = derive(embedded("loop.keep_checkpoints=3"), QWEN_4B)
    assert more.disk_bytes - base.disk_bytes == base.checkpoint_bytes
    every_50th = derive(embedded("loop.steps=150", "loop.checkpoint_every=50", "loop.keep_every=50"), QWEN_4B)
    assert every_50th.num_checkpoints == base.num_checkpoints + 3 == 2 + 1 + 3
    assert every_50th.disk_bytes - base.disk_bytes == 3 * base.checkpoint_bytes
    assert derive(embedded("loop.steps=300"), QWEN_4B).disk_bytes > base.disk_bytes


def test_plain_values_carry_the_totals() -> None:
    derived = derive(embedded(), TINY)
    plain = derived.to_dict()
    assert plain["rank_memory"]["total"] == derived.rank_memory.total
    assert plain["packs_per_step"] == {"low": 4, "high": 52}


@pytest.mark.parametrize(
    ("facts", "overrides", "parts"),
    [
        (
            replace(TINY, max_position=20),
            [],
            ["data.max_prompt_tokens (16)", "rollout.max_tokens (6)", "22", "20 positions"],
        ),
        (
            replace(TINY, num_heads=3),
            ["rollout.tensor_parallel_size=2", "runtime.gpus_per_engine=2", "runtime.gpus_per_rank=1"],
            ["rollout.tensor_parallel_size (2)", "3 attention heads"],
        ),
        (QWEN_4B, ["rollout.kv_cache_mib=6"], ["rollout.kv_cache_mib (6)", "22 tokens", "at least 7"]),
    ],
)
def test_problems_between_model_and_configuration(facts: ModelFacts, overrides: list[str], parts: list[str]) -> None:
    transfer = ["weight_sync.backend=nccl"] if len(overrides) == 3 else []
    (message,) = model_problems(embedded(*overrides, *transfer), facts)
    assert [part for part in parts if part not in message] == []


def test_a_fitting_model_has_no_problems() -> None:
    assert model_problems(embedded(), SHIPPED) == []
    assert model_problems(embedded(), TINY) == []
    assert model_problems(embedded(), QWEN_4B) == []
