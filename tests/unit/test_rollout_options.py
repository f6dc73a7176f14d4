"""What vLLM is started with, and how much of a card an engine takes."""

from __future__ import annotations

import pytest

from grpo_lib.config import RolloutConfig, RunConfig, resolve
from grpo_lib.data.models import inspect_model, resolve_model_path
from grpo_lib.derived import engine_memory
from grpo_lib.placement import engine_gpu_share, engines_per_card, ranks_per_card, shares_cards
from grpo_lib.rollout.options import GpuBudget, gpu_arguments, graph_sizes

GIB = 1 << 30


def test_the_cache_is_what_the_share_leaves() -> None:
    budget = GpuBudget(share=0.25, fixed_bytes=12 * GIB)
    assert budget.kv_cache_bytes(140 * GIB) == 23 * GIB
    with pytest.raises(ValueError, match=r"0\.25 of 40\.0 GiB, but needs 12\.0 GiB .* raise rollout.gpu_memory_share"):
        budget.kv_cache_bytes(40 * GIB)


def test_gpu_arguments() -> None:
    config = RolloutConfig(max_num_seqs=100, sleep_while_training=True)
    arguments = gpu_arguments(config, GpuBudget(share=0.5, fixed_bytes=GIB), total_bytes=10 * GIB)
    assert arguments["kv_cache_memory_bytes"] == 4 * GIB
    assert (arguments["enable_sleep_mode"], arguments["async_scheduling"]) == (True, True)
    assert arguments["compilation_config"]["cudagraph_capture_sizes"][-1] == 100


@pytest.mark.parametrize("sequences", [1, 2, 7, 8, 100, 256, 500, 512])
def test_every_batch_fits_a_graph(sequences: int) -> None:
    sizes = graph_sizes(sequences)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == sequences
    padded = [min(size for size in sizes if size >= batch) for batch in range(1, sequences + 1)]
    assert all(size <= max(batch + 8, 1.5 * batch) for batch, size in enumerate(padded, start=1))


def test_graphs_end_where_they_stop_paying() -> None:
    assert graph_sizes(4096)[-1] == 512
    assert len(graph_sizes(256)) == 15


def placed(rank: float, engine: float, *overrides: str) -> RunConfig:
    backend = "ipc" if rank + engine <= 1 else "nccl"
    return resolve(
        "embedded_addition",
        [
            f"runtime.gpus_per_rank={rank}",
            f"runtime.gpus_per_engine={engine}",
            f"weight_sync.backend={backend}",
            *overrides,
        ],
    )


def test_defaults_of_the_share() -> None:
    shared, apart = placed(0.5, 0.5), placed(1, 1)
    assert shares_cards(shared)
    assert engine_gpu_share(shared) == 0.25
    assert not shares_cards(apart)
    assert engine_gpu_share(apart) == 0.9
    assert engine_gpu_share(placed(0.5, 0.5, "rollout.gpu_memory_share=0.4")) == 0.4


@pytest.mark.parametrize(
    ("rank", "engine", "overrides", "expected"),
    [
        (0.5, 0.5, (), (1, 1)),
        (1, 1, ("rollout.num_engines=4",), (1, 1)),
        (0.1, 0.3, ("trainer.num_ranks=9", "rollout.num_engines=4"), (7, 3)),  # (1 - .3) / .1 and (1 - .1) / .3
        (0.7, 0.1, ("rollout.num_engines=8",), (1, 3)),
    ],
)
def test_the_fullest_card(rank: float, engine: float, overrides: tuple[str, ...], expected: tuple[int, int]) -> None:
    config = placed(rank, engine, *overrides, "rollout.gpu_memory_share=0.05")
    assert (ranks_per_card(config), engines_per_card(config)) == expected


def test_scoring_a_long_sequence_is_part_of_an_engines_memory() -> None:
    facts = inspect_model(resolve_model_path("builtin:tiny_qwen3"))
    long = placed(0.5, 0.5, "rollout.max_tokens=200", "trainer.pack_length=256", "rollout.max_num_seqs=8")
    few = placed(0.5, 0.5, "rollout.max_tokens=200", "trainer.pack_length=256", "rollout.max_num_seqs=8",
                 "rollout.max_batched_tokens=64")  # fmt: skip
    assert engine_memory(long, facts).logits == (4 + 8) * 264 * 216  # prompt 16 + response 200, fp32 model
    assert engine_memory(few, facts).logits == (4 + 8) * 264 * 64
    assert engine_memory(long, facts).kv_cache == 0
