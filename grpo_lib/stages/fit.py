"""`fit`: the GRPO loop on live parts, and what it leaves behind."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from grpo_lib import loop
from grpo_lib.config import RunConfig
from grpo_lib.data.chat import load_tokenizer, stop_token_ids, token_decoder
from grpo_lib.data.models import resolve_model_path
from grpo_lib.data.order import PromptStream
from grpo_lib.data.prompts import Split
from grpo_lib.data.store import read_prompts
from grpo_lib.errors import DataError
from grpo_lib.interfaces import Tracker, VerifierPool
from grpo_lib.loop import LoopState, StepRecord
from grpo_lib.pipeline import RolloutPipeline
from grpo_lib.stages.attempts import Attempt, attempt
from grpo_lib.stages.checkpoints import ResumePoint, checkpoints_of
from grpo_lib.stages.continuation import starting_point
from grpo_lib.stages.live import LiveRun, live_run
from grpo_lib.stages.lost_steps import truncate_to
from grpo_lib.stages.published import fetch_for_training, publish_result
from grpo_lib.stages.recorder import DiskRecorder
from grpo_lib.stages.run_paths import RunPaths, clear
from grpo_lib.timing import SPANS, StepTimer
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
    on_span: Callable[[int, str], None] | None = None,
    from_shards: bool = True,
    after: Callable[[LiveRun, VerifierPool], None] | None = None,
) -> TrainingResult:
    """Train from the sharded base model to `loop.steps` and export the result.

    It goes on from the run's last complete checkpoint, where there is one: with the trainer's state, the place in the
    order of prompts and the version number of that step. Rows of later steps, which are done again, are moved aside.
    Where all steps are done, the exported model and what was judged of it stay.

    Args:
        run_id: Names the wandb run; one that a checkpoint names is continued instead.
        on_step: Told of every finished step.
        on_span: Told step and name of every span before its work begins.
        from_shards: Start from `shard_model`'s checkpoint; else straight from the model folder.
        after: Called once with the live parts when all steps are done and the export is written. The engines hold the
            last version.

    Raises:
        RunBusy: another process is at work on the run.
        ConfigError: the run was begun under another configuration.
        DataError: the checkpoint is of another run, or its trainer has another version than it says.
    """
    entered = time.perf_counter()
    step_starts: list[float] = []
    with attempt(paths, stage="fit") as current:
        point = _prepared(config, paths, current, from_shards=from_shards)

        def begin_step(step: int) -> None:
            if not step_starts:
                clear(*paths.after_training)  # results of fewer steps, kept until this attempt is sure to train
            step_starts.append(time.perf_counter())
            current.at_step(step)

        with _parts(config, paths, point, from_shards=from_shards) as (live, pipeline, verifiers):
            current.started(live.processes)
            with _recorder(config, paths, live, _tracker_id(point, run_id), on_step) as recorder:
                state = loop.fit(
                    config,
                    trainer=live.trainer,
                    sync=live.sync,
                    pipeline=pipeline,
                    recorder=recorder,
                    state=_loop_state(point),
                    timer=StepTimer(on_span=_span_listener(current, on_span)),
                    before_step=begin_step,
                )
                trained = time.perf_counter()
                _export(live, paths)
                version = live.trainer.policy_version
                if after is not None:
                    after(live, verifiers)
        publish_result(paths)
    first_request = step_starts[0] if step_starts else trained
    return _result(paths, steps=state.steps_done, policy_version=version, start_s=first_request - entered)


def _prepared(config: RunConfig, paths: RunPaths, current: Attempt, *, from_shards: bool) -> ResumePoint | None:
    """Bring what is read, find where to start, and leave the tables of steps as they were there."""
    fetch_for_training(paths, from_shards=from_shards)
    point = starting_point(config, paths, current)
    truncate_to(paths, None if point is None else point.state)
    return point


def _export(live: LiveRun, paths: RunPaths) -> None:
    """Write the trained model. One that is there is of these weights: the first step of an attempt removes it."""
    if not paths.export.is_dir():
        clear(paths.export)  # what a killed attempt left of it
        live.trainer.export_hf(paths.export)


def _span_listener(current: Attempt, on_span: Callable[[int, str], None] | None) -> Callable[[str], None]:
    def listen(name: str) -> None:
        current.in_span(name)
        if on_span is not None and current.step is not None:
            on_span(current.step, name)

    return listen


@contextmanager
def _parts(
    config: RunConfig, paths: RunPaths, point: ResumePoint | None, *, from_shards: bool
) -> Iterator[tuple[LiveRun, RolloutPipeline, VerifierPool]]:
    """Trainer, engines and verifiers, at the place where the attempt starts."""
    model_path = resolve_model_path(config.model.path)
    prompts = read_prompts(paths.data, Split.TRAIN)
    tokenizer = load_tokenizer(model_path)
    stops = stop_token_ids(model_path, tokenizer, config.rollout.stop_at)
    stream = PromptStream(prompts, config.seed)
    if point is not None:
        stream.restore(point.state.prompts)
    with (
        ProcessVerifierPool(config.verifier) as verifiers,
        live_run(
            config,
            model_path=model_path,
            canary_prompts=prompts,
            stop_token_ids=stops,
            checkpoint=_trainer_state(paths, point, from_shards=from_shards),
        ) as live,
    ):
        if point is not None:
            _check_version(live, point)
        pipeline = RolloutPipeline(
            config=config,
            engine=live.engines,
            prompts=stream,
            verifiers=verifiers,
            decode=token_decoder(tokenizer),
            stop_token_ids=stops,
        )
        yield live, pipeline, verifiers


def _trainer_state(paths: RunPaths, point: ResumePoint | None, *, from_shards: bool) -> Path | None:
    if point is not None:
        return point.path
    return paths.shards if from_shards else None


def _tracker_id(point: ResumePoint | None, run_id: str) -> str:
    return run_id if point is None or point.state.tracker_run_id is None else point.state.tracker_run_id


def _loop_state(point: ResumePoint | None) -> LoopState:
    if point is None:
        return LoopState()
    return LoopState(steps_done=point.state.steps_done, empty_steps=point.state.empty_steps)


def _check_version(live: LiveRun, point: ResumePoint) -> None:
    """The loop sends what the trainer holds: make sure that this is what the checkpoint says."""
    if live.trainer.policy_version != point.state.policy_version:
        raise DataError(
            f"checkpoint {point.path} is of policy version {point.state.policy_version}, and its trainer state of "
            f"version {live.trainer.policy_version}: the two do not belong together; remove it to use the one before"
        )


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
    tracker_run_id: str,
    on_step: Callable[[StepRecord], None] | None,
) -> Iterator[DiskRecorder]:
    """Whatever happens inside, the writer and the trackers end; only a run that succeeded is also finished."""
    with ExitStack() as stack:
        trackers: list[Tracker] = []
        if config.tracking.wandb:
            tracker = WandbTracker(
                project=config.tracking.project,
                run_id=tracker_run_id,
                config=config.model_dump(mode="json"),
                directory=paths.tracking,
            )
            stack.callback(tracker.close)
            trackers.append(tracker)
        recorder = DiskRecorder(
            config,
            paths,
            trainer=live.trainer,
            trackers=trackers,
            tracker_run_id=tracker_run_id if trackers else None,
            on_step=on_step,
        )
        stack.callback(recorder.close)
        yield recorder
        recorder.finish()


def _median_spans(paths: RunPaths) -> dict[str, float]:
    rows = list(read_metrics(paths.metrics))
    warm = rows[min(5, len(rows) - 1) :]  # the first steps fill caches
    return {name: statistics.median(row[f"time/{name}_s"] for row in warm) for name in (*SPANS, "other", "step")}
