"""Where an attempt of `fit` starts, and what it says about it: from the beginning, or from the run's own checkpoint."""

from __future__ import annotations

import logging

from grpo_lib.config import RunConfig, flat
from grpo_lib.data.models import resolve_model_path
from grpo_lib.errors import ConfigError, DataError
from grpo_lib.stages.attempts import Attempt
from grpo_lib.stages.checkpoints import ResumePoint, newest_or_none_made
from grpo_lib.stages.lineage import flattened, lineage
from grpo_lib.stages.run_paths import RunPaths
from grpo_lib.stages.stored_run import StoredRun, open_run

log = logging.getLogger(__name__)

_SHOWN_CHANGES = 10


def starting_point(config: RunConfig, paths: RunPaths, current: Attempt) -> ResumePoint | None:
    """The run's last complete checkpoint, if it may be used; None is the beginning. Both are logged and noted.

    Raises:
        ConfigError: the run was begun under another configuration.
        DataError: the checkpoint was written by a run that this one does not continue; or all checkpoints are damaged.
        StorageError: a checkpoint cannot be read now.
    """
    point = newest_or_none_made(paths)
    run = open_run(str(paths.run)) if paths.record.is_file() else None
    if run is not None:
        refuse_other_config(run, config)
    if point is None:
        if current.number > 1 or (run is not None and run.origins):
            log.info("no checkpoint in %s: training starts at the first step", paths.checkpoints)
        return None
    _refuse_stranger(point, paths, run)
    done, steps = point.state.steps_done, config.loop.steps
    changes = [] if run is None else changed_origin(run, config)
    version = point.state.policy_version
    current.note("continues", from_step=done, policy_version=version, checkpoint=str(point.path), changed=changes)
    log.info("continues after step %d of %d with policy version %d", done, steps, version)
    for change in changes[:_SHOWN_CHANGES]:
        log.warning("not as when the run began: %s", change)
    if len(changes) > _SHOWN_CHANGES:
        log.warning("and %d more differences, in %s", len(changes) - _SHOWN_CHANGES, paths.attempts)
    if done >= steps:
        log.info("all %d steps are done: nothing is trained, the model is exported", steps)
    return point


def refuse_other_config(run: StoredRun, config: RunConfig) -> None:
    """Raise unless the run was begun, or last continued, under this configuration.

    Raises:
        ConfigError: one problem per setting that differs.
    """
    before, now = flat(run.config), flat(config)
    apart = [key for key in now if before[key] != now[key]]
    if apart:
        raise ConfigError(
            [
                f"{key} is {before[key]} in run {run.run_id} and {now[key]} now; a run goes on under its own "
                "configuration, of which `grpo run resume RUN --set ...` may change some settings"
                for key in apart
            ]
        )


def changed_origin(run: StoredRun, config: RunConfig) -> list[str]:
    """What code, packages, machine and model are now and were not when the run began, one line each."""
    before = flattened(run.lineage)
    now = flattened(lineage(config, resolve_model_path(config.model.path)))
    names = [*before, *(name for name in now if name not in before)]
    return [
        f"{name} was {before.get(name, 'absent')} and is {now.get(name, 'absent')}"
        for name in names
        if before.get(name) != now.get(name)
    ]


def _refuse_stranger(point: ResumePoint, paths: RunPaths, run: StoredRun | None) -> None:
    """A checkpoint belongs to this run or to one that it continues; any other would train somebody else's policy."""
    own = {paths.run_id} if run is None else {paths.run_id, run.run_id, *run.origins}
    if point.state.run_id not in own:
        raise DataError(
            f"checkpoint {point.path} was written by run {point.state.run_id}, which is neither {paths.run_id} nor a "
            "run that it continues: it was put there by hand. Remove it, or continue the run that it belongs to"
        )
