"""`shard_model`: the base model in the trainer's own sharding, a barrier, and proof that nothing changed on the way."""

from __future__ import annotations

import time

from grpo_lib.config import RunConfig
from grpo_lib.data.models import inspect_model, resolve_model_path
from grpo_lib.errors import DataError
from grpo_lib.stages.checkpoints import save_once
from grpo_lib.stages.live import live_trainer
from grpo_lib.stages.run_paths import RunPaths, clear
from grpo_lib.types import ShardPlan


def run(config: RunConfig, paths: RunPaths) -> ShardPlan:
    """Load, shard, write the sharded checkpoint, meet, gather again and compare with the source tensor by tensor.

    A checkpoint that an earlier attempt left is removed first.

    Raises:
        DeadlineExceeded: names the ranks that did not reach the barrier.
        DataError: a gathered tensor differs from the source.
    """
    model_path = resolve_model_path(config.model.path)
    deadlines = config.deadlines
    clear(paths.shards)
    with live_trainer(config, model_path=model_path) as (trainer, group):
        save_once(trainer, paths.shards)
        started = time.perf_counter()
        group.call(
            "barrier",
            "sharded",
            deadlines.barrier_s,
            deadline_s=deadlines.barrier_s + 10.0,  # the ranks' own deadline ends first: it knows who is missing
            setting="deadlines.barrier_s",
        )
        barrier_s = time.perf_counter() - started
        reports = group.call("shard_report", deadline_s=deadlines.train_s, setting="deadlines.train_s")
    plan = ShardPlan(
        backend=config.trainer.backend,
        num_ranks=config.trainer.num_ranks,
        dtype=config.model.dtype,
        tensors=reports[0],
        checkpoint=str(paths.shards),
        tied_embeddings=inspect_model(model_path).tied_embeddings,
        barrier_s=barrier_s,
    )
    if plan.mismatched:
        raise DataError(
            f"sharding changed {len(plan.mismatched)} of {len(plan.tensors)} tensors of {model_path}: "
            f"{', '.join(plan.mismatched[:5])}; the trainer does not hold the source's weights"
        )
    paths.mirror().publish(paths.shards)
    return plan
