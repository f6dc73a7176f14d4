"""`grpo run resume`: a stopped run goes on in its own folder, without Metaflow: `fit`, `evaluate`, `parity_report`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from grpo_lib.config import RunConfig, config_hash, flat, with_overrides
from grpo_lib.data.models import inspect_model, resolve_model_path
from grpo_lib.data.store import MANIFEST
from grpo_lib.errors import ConfigError
from grpo_lib.parity.finished_run import is_free
from grpo_lib.preflight import run_preflight
from grpo_lib.stages import evaluate, fit, parity_report, prepare_data
from grpo_lib.stages.attempts import attempt
from grpo_lib.stages.fit import TrainingResult
from grpo_lib.stages.stored_run import StoredRun, write_run

# Among what does not decide what is learned, these decide whose files are read, and how they are laid out.
_FIXED = frozenset({"recipe", "seed", "storage", "trainer.backend", "trainer.zero_stage"})


class Stage(StrEnum):
    """Where a resumed run may stop."""

    FIT = "fit"
    EVALUATE = "evaluate"
    PARITY_REPORT = "parity_report"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedRun:
    """What the stages that were run returned."""

    training: TrainingResult
    evaluation: dict[str, Any] | None  # None where the run was stopped before
    parity: dict[str, Any] | None


def run(
    stored: StoredRun,
    *,
    overrides: Sequence[str] = (),
    until: Stage = Stage.PARITY_REPORT,
    on_span: Callable[[int, str], None] | None = None,
) -> ResumedRun:
    """Continue in place. What is missing before `fit` is made first; where there is no checkpoint, training begins.

    Args:
        overrides: ``key.path=value`` of settings that a run may change on its way; they are its own from now on.
        until: The last stage that is run.
        on_span: Told step and name of every span of the loop before its work begins.

    Raises:
        RunBusy: another process is at work on the run.
        ConfigError: an override is malformed, or of a setting that decides what is learned.
        PreflightError: this machine cannot hold the run.
    """
    config, paths = changed_config(stored, overrides), stored.paths
    with attempt(paths, stage="resume") as current:
        run_preflight(config, inspect_model(resolve_model_path(config.model.path)), root=paths.run)
        if config != stored.config:
            current.note("changes", config_hash=config_hash(config), overrides=list(overrides))
            write_run(
                paths,
                run_id=stored.run_id,
                config=config,
                config_hash=config_hash(config),
                lineage=stored.lineage,
                origins=stored.origins,
            )
        published = paths.mirror().published()
        if not (paths.data / MANIFEST).is_file() and paths.data not in published:
            prepare_data.run(config, paths)
        training = fit.run(
            config,
            paths,
            run_id=paths.run.name,
            on_span=on_span,
            from_shards=paths.shards.is_dir() or paths.shards in published,
        )
        if until is Stage.FIT:
            return ResumedRun(training=training, evaluation=None, parity=None)
        evaluated = evaluate.run(config, paths, policy_version=training.policy_version)
        if until is Stage.EVALUATE:
            return ResumedRun(training=training, evaluation=evaluated.evaluation, parity=None)
        report = parity_report.run(
            config,
            paths,
            rollouts=evaluated.rollouts,
            evaluation=evaluated.evaluation,
            policy_version=training.policy_version,
        )
    return ResumedRun(training=training, evaluation=evaluated.evaluation, parity=report.parity)


def changed_config(stored: StoredRun, overrides: Sequence[str]) -> RunConfig:
    """The run's configuration with what may change on its way.

    Raises:
        ConfigError: every override that is malformed or may not.
    """
    config = with_overrides(stored.config, overrides)
    before, now = flat(stored.config), flat(config)
    problems = [
        problem
        for key in now
        if before[key] != now[key] and (problem := _objection(key, before[key], now[key], config)) is not None
    ]
    if problems:
        raise ConfigError(problems)
    return config


def _objection(key: str, before: Any, now: Any, config: RunConfig) -> str | None:
    """Why a run may not change a setting on its way; None when it may."""
    fixed = f"{key} was {before} and would be {now}"
    if key == "loop.steps":
        if now < before:
            return f"{fixed}: steps can be added to a run, not taken from it"
        if config.trainer.lr_scheduler != "constant":
            return (
                f"{fixed}: with trainer.lr_scheduler={config.trainer.lr_scheduler} the learning rate of the steps that "
                "were done depends on it; start a new run"
            )
        return None
    if key in _FIXED or key.partition(".")[0] in _FIXED or not (is_free(key) or key.startswith("evaluation.")):
        return f"{fixed}: it decides what the run learns, so the rows before and after would not be of one run"
    return None
