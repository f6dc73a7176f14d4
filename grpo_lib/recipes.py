"""Named runs: each is a function that returns a whole configuration, to which overrides are applied."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from grpo_lib.config import (
    DataConfig,
    EvaluationConfig,
    LoopConfig,
    ModelConfig,
    ParityConfig,
    RolloutConfig,
    RunConfig,
    RuntimeConfig,
    TrainerConfig,
    WeightSyncConfig,
)


def embedded_addition() -> RunConfig:
    """Sums x + y with the shipped 276 k-parameter Qwen3: two CPU ranks and one CPU engine, minutes on two cores.

    The section defaults are this recipe.
    """
    return RunConfig(recipe="embedded_addition")


def smollm2_addition() -> RunConfig:
    """Two-digit sums in three-shot prompts with SmolLM2-135M (`grpo get-model smollm2_135m`): one GPU, one rank, one
    engine, bfloat16 with fp32 master weights.

    Tolerances are those of bfloat16 on two implementations: means near 0.04 nats, single tokens up to 1.
    """
    return RunConfig(
        recipe="smollm2_addition",
        model=ModelConfig(path="cached:smollm2_135m", dtype="bfloat16"),
        data=DataConfig(
            template="raw",
            num_shots=3,
            max_x=100,
            max_y=100,
            num_train=3200,
            num_heldout=256,
            max_prompt_tokens=80,
        ),
        rollout=RolloutConfig(group_size=8, max_tokens=8, stop_at="line"),
        trainer=TrainerConfig(num_ranks=1, pack_length=10240, micro_batch_packs=1, learning_rate=1e-5),
        loop=LoopConfig(steps=100, prompts_per_step=32),
        weight_sync=WeightSyncConfig(backend="ipc", canary_tolerance=0.5),
        evaluation=EvaluationConfig(samples_per_prompt=24),
        parity=ParityConfig(
            max_abs=1.5,
            p999_abs=0.5,
            mean_abs=0.05,
            decode_score_max_abs=0.6,
            replay_max_abs=1.0,
            replay_relative=0.1,
            free_weight_relative=0.1,
        ),
        runtime=RuntimeConfig(
            cpus_per_rank=1.0, cpus_per_engine=1.0, gpus_per_rank=0.5, gpus_per_engine=0.5, threads_per_process=4
        ),
    )


RECIPES: Mapping[str, Callable[[], RunConfig]] = {
    recipe.__name__: recipe for recipe in (embedded_addition, smollm2_addition)
}
default_recipe = embedded_addition
