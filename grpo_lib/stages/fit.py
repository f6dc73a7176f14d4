"""`fit`: the GRPO loop on live parts, and what it leaves behind."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from grpo_lib import loop
from grpo_lib.config import RunConfig
from grpo_lib.data.chat import load_tokenizer, stop_token_ids, token_decoder
from grpo_lib.data.models import resolve_model_path
from grpo_lib.data.order import PromptStream
from grpo_lib.data.prompts import Split
from grpo_lib.data.store import read_prompts
from grpo_lib.interfaces import Tracker, VerifierPool
from grpo_lib.loop import StepRecord
from grpo_lib.pipeline import RolloutPipeline
from grpo_lib.stages.checkpoints import checkpoints_of
from grpo_lib.stages.live import LiveRun, live_run
from grpo_lib.stages.recorder import DiskRecorder
from grpo_lib.stages.run_paths import RunPaths, clear
from grpo_lib.timing import SPANS
from grpo_lib.tracking import WandbTracker, read_metrics
from grpo_lib.verifiers.pool import ProcessVerifierPool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """Where a finished `fit` left its results."""

    steps: int
    policy_version: int
    start_s: float  # from entry to the first request for rollouts, initial weight sync included
    spans_median_s: dict[str, float]  # by span name, warm steps
    metrics: str  # JSON lines; the same rows stand in a Parquet file beside it
    certificates: str
    rollout_index: str
    checkpoints: tuple[str, ...]
    export: str  # trained model as a Hugging Face folder


def run(
    config: RunConfig,
    paths: RunPaths,
    *,
    run_id: str,
    on_step: Callable[[StepRecord], None] | None = None,
    from_shards: bool = True,
    after: Callable[[LiveRun, VerifierPool], None] | None = None,
) -> TrainingResult:
    """Train from the sharded base model to `loop.steps` and export the result.

    What an earlier attempt of this run left is removed first: its rows would stand beside those of this one.

    Args:
        run_id: Names the wandb run.
        on_step: Told of every finished step.
        from_shards: Start from `shard_model`'s checkpoint; else straight from the model folder.
        after: Called once with the live parts when all steps are done and the export is written. The engines hold the
            last version.
    """
    entered = time.perf_counter()
    clear(*paths.of_fit)
    model_path = resolve_model_path(config.model.path)
    prompts = read_prompts(paths.data, Split.TRAIN)
    tokenizer = load_tokenizer(model_path)
    stops = stop_token_ids(model_path, tokenizer, config.rollout.stop_at)
    step_starts: list[float] = []
    with (
        ProcessVerifierPool(config.verifier) as verifiers,
        live_run(
            config,
            model_path=model_path,
            canary_prompts=prompts,
            stop_token_ids=stops,
            checkpoint=paths.shards if from_shards else None,
        ) as live,
        _recorder(config, paths, live, run_id, on_step) as recorder,
    ):
        pipeline = RolloutPipeline(
            config=config,
            engine=live.engines,
            prompts=PromptStream(prompts, config.seed),
            verifiers=verifiers,
            decode=token_decoder(tokenizer),
            stop_token_ids=stops,
        )
        state = loop.fit(
            config,
            trainer=live.trainer,
            sync=live.sync,
            pipeline=pipeline,
            recorder=recorder,
            before_step=lambda _: step_starts.append(time.perf_counter()),
        )
        live.trainer.export_hf(paths.export)
        version = live.trainer.policy_version
        if after is not None:
            after(live, verifiers)
    return _result(paths, steps=state.steps_done, policy_version=version, start_s=step_starts[0] - entered)


def _result(paths: RunPaths, *, steps: int, policy_version: int, start_s: float) -> TrainingResult:
    return TrainingResult(
        steps=steps,
        policy_version=policy_version,
        start_s=start_s,
        spans_median_s=_median_spans(paths),
        metrics=str(paths.metrics),
        certificates=str(paths.certificates),
        rollout_index=str(paths.rollout_index),
        checkpoints=tuple(str(path) for path in checkpoints_of(paths)),
        export=str(paths.export),
    )


@contextmanager
def _recorder(
    config: RunConfig,
    paths: RunPaths,
    live: LiveRun,
    run_id: str,
    on_step: Callable[[StepRecord], None] | None,
) -> Iterator[DiskRecorder]:
    """Whatever happens inside, the writer and the trackers end; only a run that succeeded is also finished."""
    with ExitStack() as stack:
        trackers: list[Tracker] = []
        if config.tracking.wandb:
            tracker = WandbTracker(
                project=config.tracking.project,
                run_id=run_id,
                config=config.model_dump(mode="json"),
                directory=paths.tracking,
            )
            stack.callback(tracker.close)
            trackers.append(tracker)
        recorder = DiskRecorder(config, paths, trainer=live.trainer, trackers=trackers, on_step=on_step)
        stack.callback(recorder.close)
        yield recorder
        recorder.finish()


def _median_spans(paths: RunPaths) -> dict[str, float]:
    rows = list(read_metrics(paths.metrics))
    warm = rows[min(5, len(rows) - 1) :]  # the first steps fill caches
    return {name: statistics.median(row[f"time/{name}_s"] for row in warm) for name in (*SPANS, "other", "step")}
