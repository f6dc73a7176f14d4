"""What a checkpoint costs the steps it is written behind: `python benchmarks/checkpoints.py --out DIR`, one JSON line.

Blocks of steps with a checkpoint after the first one alternate with blocks without any, on the same ranks and the same
batch. A step is forward, backward and optimiser step: the generation of a real step, in which the ranks have nothing
else to do, is left out, so this is the worst case. `block_ratio` compares whole blocks, the copy of the state and the
wait for what is left of the writing at their end included; `next_step_ratio` the second step of each block alone.

`--run` compares whole runs of the recipe instead, one with a checkpoint at every step and one with none before the last
step.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from grpo_lib.algo.packing import plan_step
from grpo_lib.config import RunConfig
from grpo_lib.data.models import inspect_model, resolve_model_path
from grpo_lib.derived import derive
from grpo_lib.ray_runtime.trainer_group import RayTrainerGroup
from grpo_lib.stages import begin, fit, prepare_data
from grpo_lib.stages.checkpoints import CheckpointState, CheckpointWriter
from grpo_lib.stages.live import live_trainer
from grpo_lib.stages.run_paths import RunPaths
from grpo_lib.tracking import read_metrics
from grpo_lib.types import StepPlan, TrainingSample

_COLD_STEPS = 5  # fill caches
_DOCUMENT_TOKENS = 64


def measure_steps(config: RunConfig, *, tokens: int, blocks: int, block_steps: int) -> dict[str, Any]:
    """Seconds of steps and blocks with and without a checkpoint."""
    paths = RunPaths.of(config, "checkpoints")
    model_path = resolve_model_path(config.model.path)
    plan = _plan(config, vocab_size=inspect_model(model_path).vocab_size, tokens=tokens)
    next_s: dict[bool, list[float]] = {False: [], True: []}
    block_s: dict[bool, list[float]] = {False: [], True: []}
    begin_s: list[float] = []
    with live_trainer(config, model_path=model_path) as (trainer, _):
        writer = CheckpointWriter(paths, trainer, loop=config.loop)
        for _ in range(_COLD_STEPS):
            _train(trainer, plan, writer)
        for block in range(2 * blocks):
            is_saved = block % 2 == 1
            started = time.perf_counter()
            for index in range(block_steps):
                step_started = time.perf_counter()
                _train(trainer, plan, writer)
                trained = time.perf_counter()
                if index == 1:
                    next_s[is_saved].append(trained - step_started)
                if index == 0 and is_saved:
                    writer.begin(_state(block, trainer.policy_version))
                    begin_s.append(time.perf_counter() - trained)
                    writer.recorded(block)
            writer.finish()
            block_s[is_saved].append(time.perf_counter() - started)
        writer.close()
        write_s = _alone(paths, trainer, config, 2 * blocks)
    return {
        "trainer": config.trainer.backend,
        "checkpoint_mb": derive(config, inspect_model(model_path)).checkpoint_bytes / 1e6,
        "tokens_per_step": plan.num_real_tokens,
        "blocks": blocks,
        "block_steps": block_steps,
        "s_per_step_without": statistics.median(block_s[False]) / block_steps,
        "block_ratio": statistics.median(block_s[True]) / statistics.median(block_s[False]),
        "next_step_ratio": statistics.median(next_s[True]) / statistics.median(next_s[False]),
        "begin_s": statistics.median(begin_s),
        "write_alone_s": write_s,
    }


def measure_runs(config: RunConfig, *, pairs: int) -> dict[str, Any]:
    """Median seconds of the warm steps of whole runs, alternating."""
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    for pair in range(pairs):
        for arm, every in (("without", config.loop.steps), ("with", 1)):
            changed = config.model_copy(update={"loop": config.loop.model_copy(update={"checkpoint_every": every})})
            paths = RunPaths.of(changed, f"{arm}-{pair}")
            prepare_data.run(changed, paths)
            fit.run(changed, paths, run_id=paths.run_id, from_shards=False)
            # The last step of both has a checkpoint to wait for.
            seconds[arm] += [row["time/step_s"] for row in read_metrics(paths.metrics)][_COLD_STEPS:-1]
    without, with_ = (statistics.median(seconds[arm]) for arm in ("without", "with"))
    return {
        "trainer": config.trainer.backend,
        "steps_counted": len(seconds["with"]),
        "s_per_step_without": without,
        "s_per_step_with": with_,
        "ratio": with_ / without,
    }


def _train(trainer: RayTrainerGroup, plan: StepPlan, writer: CheckpointWriter) -> None:
    """A step; between its phases a run's recorder looks after the checkpoint."""
    trainer.forward_backward(plan, loss_denominator=float(plan.num_trained_tokens))
    writer.poll()
    trainer.optim_step()
    writer.poll()


def _alone(paths: RunPaths, trainer: RayTrainerGroup, config: RunConfig, step: int) -> float:
    """Seconds from a snapshot to a visible checkpoint while nothing else is done."""
    writer = CheckpointWriter(paths, trainer, loop=config.loop)
    started = time.perf_counter()
    writer.begin(_state(step, trainer.policy_version))
    writer.recorded(step)
    writer.finish()
    seconds = time.perf_counter() - started
    writer.close()
    return seconds


def _state(step: int, version: int) -> CheckpointState:
    return CheckpointState(run_id="checkpoints", steps_done=step, empty_steps=0, policy_version=version, prompts={})


def _plan(config: RunConfig, *, vocab_size: int, tokens: int) -> StepPlan:
    """Documents of random tokens whose second half is trained."""
    rng = np.random.default_rng(config.seed)
    mask = np.arange(_DOCUMENT_TOKENS) >= _DOCUMENT_TOKENS // 2
    samples = [
        TrainingSample(
            sample_id=f"e0.p{index}/0",
            input_ids=rng.integers(3, vocab_size, _DOCUMENT_TOKENS),
            response_mask=mask,
            advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
            rollout_logprobs=np.where(mask, -np.log(vocab_size), 0).astype(np.float32),
        )
        for index in range(tokens // _DOCUMENT_TOKENS)
    ]
    return plan_step(
        samples,
        num_ranks=config.trainer.num_ranks,
        pack_length=config.trainer.pack_length,
        micro_batch_packs=config.trainer.micro_batch_packs,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="embedded_addition")
    parser.add_argument("--trainer", default="olmo_core")
    parser.add_argument("--model", help="Hugging Face folder; the recipe's model when absent")
    parser.add_argument("--out", type=Path, required=True, help="new folder, on the disk to be measured")
    parser.add_argument("--tokens", type=int, default=2048, help="of all ranks in one step")
    parser.add_argument("--blocks", type=int, default=6, help="of either kind")
    parser.add_argument("--block-steps", type=int, default=6)
    parser.add_argument("--run", type=int, metavar="PAIRS", help="compare so many pairs of whole runs instead")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    overrides = [
        f"storage.root={json.dumps(str(arguments.out))}",
        "algorithm.max_masked_share=1.0",  # no sampler drew these tokens
        *([f"model.path={json.dumps(arguments.model)}"] if arguments.model else []),
        *arguments.set,
    ]
    config = begin.run(recipe=arguments.recipe, overrides=overrides, trainer=arguments.trainer, seed=1).config
    try:
        if arguments.run:
            result = measure_runs(config, pairs=arguments.run)
        else:
            result = measure_steps(
                config, tokens=arguments.tokens, blocks=arguments.blocks, block_steps=arguments.block_steps
            )
    finally:
        shutil.rmtree(arguments.out, ignore_errors=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
