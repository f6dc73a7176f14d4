"""`parity_report`: engine, trainer and a plain forward score the same stored tokens; the run's own record is judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lib.config import RunConfig
from grpo_lib.data.models import resolve_model_path
from grpo_lib.errors import DataError
from grpo_lib.parity.probe import ENGINE_SCORE, StoredLogprobs, probe
from grpo_lib.parity.report import build_report, to_dict
from grpo_lib.stages.attempts import attempt
from grpo_lib.stages.diagnosis import diagnosed
from grpo_lib.stages.live import live_parts
from grpo_lib.stages.published import newest_fetched
from grpo_lib.stages.recorder import read_certificates
from grpo_lib.stages.run_paths import RunPaths
from grpo_lib.stages.scorers import ScoredBefore, ScoredBySequence, ScoredByTrainer
from grpo_lib.stages.stored_run import write_parity
from grpo_lib.storage.refs import StoreRef
from grpo_lib.storage.rollouts import read_rollouts
from grpo_lib.tracking import read_metrics
from grpo_lib.trainers.hf_scorer import HfScorer
from grpo_lib.types import RolloutGroup, ShardPlan

_SHOWN_SAMPLES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredReport:
    """The report and what its card shows, all plain data."""

    parity: dict[str, Any]
    metrics: list[dict[str, Any]]
    samples: list[dict[str, Any]]


def run(
    config: RunConfig,
    paths: RunPaths,
    *,
    rollouts: Mapping[str, Any],
    evaluation: Mapping[str, Any],
    policy_version: int,
    shard_plan: ShardPlan | None = None,
) -> StoredReport:
    """Probe on the trained policy's stored samples and judge the whole run. Nothing is raised for a FAIL.

    Args:
        rollouts: Store reference of samples drawn by `policy_version`.
        evaluation: `EvaluationResult.to_dict()`.

    Raises:
        RunBusy: another process is at work on the run.
        DataError: no usable checkpoint holds the policy of the exported model.
    """
    with attempt(paths, stage="parity_report"):
        return _judge(config, paths, rollouts, evaluation, policy_version, shard_plan)


def _judge(
    config: RunConfig,
    paths: RunPaths,
    rollouts: Mapping[str, Any],
    evaluation: Mapping[str, Any],
    policy_version: int,
    shard_plan: ShardPlan | None,
) -> StoredReport:
    store = paths.open_store()
    mirror = paths.mirror(store)
    mirror.fetch(paths.export, *paths.step_tables)
    checkpoint = trained_checkpoint(paths, policy_version=policy_version)
    groups = read_rollouts(store, StoreRef.from_dict(rollouts)).groups
    plain = HfScorer(
        paths.export,
        dtype=config.model.dtype,
        temperature=config.rollout.temperature,
        fp32_head=config.model.fp32_head,
        device="cuda" if config.runtime.gpus_per_rank > 0 else "cpu",
    )
    metrics = list(read_metrics(paths.metrics))
    with live_parts(
        config,
        trainer_model=resolve_model_path(config.model.path),
        engine_model=paths.export,
        checkpoint=checkpoint,
        engine_version=policy_version,
    ) as (trainer, engines):
        scorers = [
            StoredLogprobs(),
            ScoredBySequence(name=ENGINE_SCORE, scorer=engines),
            ScoredByTrainer(name=config.trainer.backend, trainer=trainer, config=config.trainer),
            ScoredBySequence(name="hf", scorer=plain),
        ]
        scored = [ScoredBefore(name=scorer.name, scores=scorer.score(groups)) for scorer in scorers]
    certificates = read_certificates(paths.certificates)
    report = diagnosed(
        build_report(
            config,
            pairs=probe(groups, scored, policy_version=policy_version, cap=config.algorithm.correction_cap),
            metrics=metrics,
            certificates=certificates,
            evaluation=evaluation,
            shard_plan=shard_plan,
        ),
        config,
        groups=groups,
        scores={scorer.name: scorer.scores for scorer in scored},
        models={0: resolve_model_path(config.model.path), policy_version: paths.export},
        policy_version=policy_version,
        certificates=certificates,
    )
    parity = to_dict(report)
    write_parity(paths, parity)
    mirror.publish(paths.parity)
    return StoredReport(parity=parity, metrics=metrics, samples=_samples(groups))


def trained_checkpoint(paths: RunPaths, *, policy_version: int) -> Path:
    """The newest usable checkpoint, which must be of the policy that is judged: an older one scores otherwise.

    Raises:
        DataError: there is none, or it is of another version.
    """
    point = newest_fetched(paths)
    if point is None or point.state.policy_version != policy_version:
        found = "there is none" if point is None else f"{point.path} is of version {point.state.policy_version}"
        raise DataError(
            f"run {paths.run_id}: no usable checkpoint holds policy version {policy_version}, which the exported model "
            f"has: {found}; continue the run from fit, which trains the missing steps again"
        )
    return point.path


def _samples(groups: Sequence[RolloutGroup]) -> list[dict[str, Any]]:
    """One member of each of the first groups, for people."""
    return [
        {
            "prompt": group.prompt.text,
            "answer": group.prompt.answer,
            "completion": rollout.text,
            "reward": rollout.verdict.reward,
            "finish": str(rollout.completion.finish_reason),
        }
        for group in groups[:_SHOWN_SAMPLES]
        for rollout in group.rollouts[:1]
    ]
