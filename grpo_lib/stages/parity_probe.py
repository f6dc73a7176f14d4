"""Probe of a run's stored samples: engine, trainers and a plain forward score the same tokens under the same weights.

`run` does it all. A flow that gives each trainer a process of its own calls the pieces:

    measure(run, scorer=…, store=…)   once per scorer      leaves its scores in a store
    judge(run, measurements)                               starts nothing

The samples are those that `evaluate` drew from the trained policy, the weights the exported ones. A trainer of any
backend loads the exported folder as if it were a base model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from grpo_lib.config import RunConfig
from grpo_lib.errors import DataError
from grpo_lib.parity.probe import ENGINE_DECODE, ENGINE_SCORE, StoredLogprobs, probe
from grpo_lib.parity.report import probe_report, to_dict
from grpo_lib.ray_runtime.trainer_group import RayTrainerGroup
from grpo_lib.stages.diagnosis import diagnosed
from grpo_lib.stages.live import live_engines, live_trainer
from grpo_lib.stages.parity_replay import with_backend
from grpo_lib.stages.scorers import ScoredBefore, ScoredBySequence, ScoredByTrainer
from grpo_lib.stages.stored_run import StoredRun
from grpo_lib.storage.locations import open_store
from grpo_lib.storage.refs import StoreRef
from grpo_lib.storage.scores import read_scores, write_scores
from grpo_lib.trainers.hf_scorer import HfScorer

PLAIN = "hf"  # Hugging Face's forward of each document alone


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerMeasurement:
    """Where one scorer's log-probabilities lie; small and picklable."""

    scorer: str
    scores: dict[str, Any]  # store reference
    store: str  # location


def run(run: StoredRun, *, trainers: Sequence[str]) -> dict[str, Any]:
    """Score with the engine, each trainer and a plain forward, and judge; nothing is raised for a FAIL.

    Args:
        trainers: Backends, any number.

    Returns:
        `parity.report.to_dict` of the report.
    """
    stored = run.engine_scores_ref()
    engine = (
        []
        if stored is None
        else [ScorerMeasurement(scorer=ENGINE_SCORE, scores=stored.to_dict(), store=run.paths.store)]
    )
    scorers = [*trainers, PLAIN] if engine or not can_score(run.config) else [ENGINE_SCORE, *trainers, PLAIN]
    with TemporaryDirectory(prefix="probe-") as folder:
        return judge(run, [*engine, *(measure(run, scorer=scorer, store=folder) for scorer in scorers)])


def can_score(config: RunConfig) -> bool:
    """Whether the engine can score a finished sequence as it samples: its prefill ignores the temperature."""
    return config.rollout.temperature == 1


def measure(run: StoredRun, *, scorer: str, store: str) -> ScorerMeasurement:
    """Scores of the run's probe rollouts by one scorer, which lives only as long as this call.

    Args:
        scorer: A trainer backend, `ENGINE_SCORE` or `PLAIN`.
        store: Location of the store that keeps the scores.

    Raises:
        DataError: the run has no exported model or no probe rollouts.
    """
    config, export, groups = run.config, run.paths.export, run.probe_rollouts().groups
    if not export.is_dir():
        raise DataError(f"run {run.reference}: {export} is missing; the step fit writes it at its end")
    if scorer == PLAIN:
        plain = HfScorer(
            export,
            dtype=config.model.dtype,
            temperature=config.rollout.temperature,
            fp32_head=config.model.fp32_head,
            device="cuda" if config.runtime.gpus_per_rank > 0 else "cpu",
        )
        scores = ScoredBySequence(name=scorer, scorer=plain).score(groups)
    elif scorer == ENGINE_SCORE:
        with live_engines(config, model_path=export, policy_version=run.policy_version) as engines:
            scores = ScoredBySequence(name=scorer, scorer=engines).score(groups)
    else:
        changed = with_backend(config, scorer)
        with live_trainer(changed, model_path=export) as (trainer, _):
            scores = ScoredByTrainer(name=scorer, trainer=trainer, config=changed.trainer).score(groups)
    return _stored(scorer, scores, store)


def measure_live(run: StoredRun, trainer: RayTrainerGroup, *, store: str) -> ScorerMeasurement:
    """`measure` with a running trainer, whose weights become the exported ones."""
    trainer.load_hf_weights(run.paths.export)
    config = with_backend(run.config, trainer.name)
    scorer = ScoredByTrainer(name=trainer.name, trainer=trainer, config=config.trainer)
    return _stored(trainer.name, scorer.score(run.probe_rollouts().groups), store)


def _stored(scorer: str, scores: Mapping[str, np.ndarray], store: str) -> ScorerMeasurement:
    return ScorerMeasurement(scorer=scorer, scores=write_scores(open_store(store), scores).to_dict(), store=store)


def judge(run: StoredRun, measurements: Sequence[ScorerMeasurement]) -> dict[str, Any]:
    """One report over every pair of scorers, the engine's own log-probabilities as stored among them.

    It is about stored tokens: what the run did in its own steps is for the run's report.

    Args:
        measurements: In any number and order; of two scorers the earlier one is the reference.

    Returns:
        `parity.report.to_dict` of the report.
    """
    groups, version = run.probe_rollouts().groups, run.policy_version
    scores = {ENGINE_DECODE: StoredLogprobs().score(groups)}
    for one in measurements:
        scores[one.scorer] = read_scores(open_store(one.store), StoreRef.from_dict(one.scores))
    scorers = [ScoredBefore(name=name, scores=values) for name, values in scores.items()]
    pairs = probe(groups, scorers, policy_version=version, cap=run.config.algorithm.correction_cap)
    report = diagnosed(
        probe_report(run.config, pairs=pairs, metrics=None, engine_scores=can_score(run.config)),
        run.config,
        groups=groups,
        scores=scores,
        models={0: run.model_path, version: run.paths.export},
        policy_version=version,
    )
    return to_dict(report)
