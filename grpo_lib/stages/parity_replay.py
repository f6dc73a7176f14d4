"""Replay of a run's stored steps by several trainers: in lockstep, free-running, and judged.

`run` does it all. A flow that gives each trainer a process of its own calls the pieces:

    lockstep(run, leader=…, follower=…)                      two trainers side by side in one cluster
    measure(run, trainer=…, folder=…)  once per trainer      one trainer alone; leaves files in `folder`
    compare(run, [measurement, …])                           starts nothing; the files may go afterwards
    judge(run, lockstep=…, free=…)                           starts nothing

Everything starts from the base model and takes the run's steps from 1 on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from grpo_lib import loop
from grpo_lib.config import RunConfig, with_overrides
from grpo_lib.data.files import storage_errors
from grpo_lib.errors import ConfigError, DataError
from grpo_lib.parity.free_running import FreeRunning, FreeStep, Split, compare_trajectories, free_running, noise_splits
from grpo_lib.parity.replay import ReplayStep
from grpo_lib.parity.replay import lockstep as replay_in_lockstep
from grpo_lib.parity.replay_inputs import ReplayBatch, audit_inputs
from grpo_lib.parity.report import replay_report, to_dict
from grpo_lib.ray_runtime.trainer_group import RayTrainerGroup
from grpo_lib.stages.live import live_trainer, live_trainers
from grpo_lib.stages.replay_files import StateFile, read_trajectory, write_trajectory
from grpo_lib.stages.stored_run import StoredRun
from grpo_lib.types import TRAINING_STATE

MODES = ("lockstep", "free")
_SETTING = "storage.root"


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeMeasurement:
    """Where one trainer's free-running trajectories lie; small and picklable."""

    trainer: str
    configured: str  # folder of the trajectory with the configured micro-batches
    others: tuple[str, ...]  # with other numbers of them: against the first one, the noise floor


def run(
    run: StoredRun, *, trainers: Sequence[str], steps: int | None = None, modes: Sequence[str] = MODES
) -> dict[str, Any]:
    """Replay with all trainers and judge; nothing is raised for a FAIL.

    Args:
        trainers: Backends, at least two; the first is the leader, and the reference of every distance.
        steps: Steps with trainable tokens to take; `parity.replay_steps` by default.
        modes: Of `MODES`.

    Returns:
        `parity.report.to_dict` of the report.

    Raises:
        ConfigError: an unknown trainer or mode, or fewer than two trainers.
        DataError: the run's record has no steps with trainable tokens, or not from step 1 on.
    """
    if len(trainers) < 2 or set(modes) - set(MODES) or not modes:
        raise ConfigError([f"replay of {list(trainers)} in {list(modes)}: give two trainers, and modes of {MODES}"])
    leader, *followers = trainers
    replayed: list[ReplayStep] = []
    free: tuple[FreeRunning, ...] = ()
    if "lockstep" in modes:
        for follower in followers:
            replayed += lockstep(run, leader=leader, follower=follower, steps=steps)
    if "free" in modes:
        with _scratch(run) as folder:
            measured = [
                measure(run, trainer=trainer, folder=folder / f"{index}-{trainer}", steps=steps)
                for index, trainer in enumerate(trainers)
            ]
            free = compare(run, measured)
    return judge(run, lockstep=replayed, free=free)


def lockstep(run: StoredRun, *, leader: str, follower: str, steps: int | None = None) -> tuple[ReplayStep, ...]:
    """Both trainers side by side in one cluster, each step from the leader's state.

    Args:
        steps: As for `run`.
    """
    configs = [with_backend(run.config, backend) for backend in (leader, follower)]
    batches = stored_batches(run, steps)
    with _scratch(run) as folder, live_trainers(configs, model_path=run.model_path) as (first, second):
        return tuple(replay_in_lockstep(first, second, batches, config=configs[0], scratch=folder, read=StateFile))


def measure(run: StoredRun, *, trainer: str, folder: Path, steps: int | None = None) -> FreeMeasurement:
    """One trainer's own way through the stored steps: as configured, and again with other micro-batch splits.

    Args:
        trainer: Backend.
        folder: Is created, or emptied by the caller before; a dump of the weights per step stays there until `compare`.
        steps: As for `run`.

    Raises:
        DataError: the rollouts cannot be split otherwise; the message says what to change.
    """
    with live_trainer(with_backend(run.config, trainer), model_path=run.model_path) as (live, _):
        return measure_live(run, live, folder=folder, steps=steps)


def measure_live(
    run: StoredRun, trainer: RayTrainerGroup, *, folder: Path, steps: int | None = None
) -> FreeMeasurement:
    """`measure` with a trainer that has just started from the run's base model."""
    config = with_backend(run.config, trainer.name)
    batches = stored_batches(run, steps)
    splits = (Split.CONFIGURED, *noise_splits(config, trainer.num_ranks, batches))
    with _scratch(run) as scratch:
        trainer.dump_state(scratch, TRAINING_STATE)
        for split in splits:
            with storage_errors(folder / split, setting=_SETTING):
                (folder / split).mkdir(parents=True)
            trainer.restore_state(scratch)
            trajectory = free_running(trainer, batches, config=config, folder=folder / split, split=split)
            write_trajectory(folder / split, trajectory)
    configured, *others = (str(folder / split) for split in splits)
    return FreeMeasurement(trainer=trainer.name, configured=configured, others=tuple(others))


def compare(run: StoredRun, measurements: Sequence[FreeMeasurement]) -> tuple[FreeRunning, ...]:
    """What the trajectories say, tensor by tensor; their folders are not needed any more. Starts no process.

    Args:
        measurements: The leader's first; each later one is compared with it.
    """
    return tuple(_compare(run.config, measurements[0], other) for other in measurements[1:])


def judge(run: StoredRun, *, lockstep: Sequence[ReplayStep] = (), free: Sequence[FreeRunning] = ()) -> dict[str, Any]:
    """One report of what was replayed; starts no process.

    Args:
        lockstep: From `lockstep`, of any number of pairs.
        free: From `compare`. What is left out is not checked.

    Returns:
        `parity.report.to_dict` of the report.
    """
    taken = {step.step for step in lockstep} | {step.step for pair in free for step in pair.steps}
    if not taken:
        raise ValueError("nothing was replayed, so there is nothing to judge")
    batches = list(islice(_batches(run), max(taken)))
    report = replay_report(
        run.config,
        lockstep=_by_pair(lockstep),
        free=free,
        audits=audit_inputs(batches, run.config),
        stored={batch.step: batch.content_digest for batch in batches},
    )
    return to_dict(report)


def with_backend(config: RunConfig, backend: str) -> RunConfig:
    """The run's configuration with another trainer backend.

    Raises:
        ConfigError: there is no such backend, or it breaks a rule.
    """
    return with_overrides(config, [f"trainer.backend={backend}"])


def stored_batches(run: StoredRun, steps: int | None) -> list[ReplayBatch]:
    """The run's steps from 1 on, up to `steps` with trainable tokens or the last one stored.

    Raises:
        DataError: none of the stored steps has a trainable token, or the first ones were not stored.
    """
    wanted = run.config.parity.replay_steps if steps is None else steps
    if wanted < 1:
        raise ConfigError([f"replay of {wanted} steps; take at least 1"])
    batches: list[ReplayBatch] = []
    trainable = 0
    for batch in _batches(run):
        batches.append(batch)
        trainable += bool(loop.trainable_samples(run.config, batch.rollouts))
        if trainable == wanted:
            break
    if not trainable:
        raise DataError(f"run {run.reference}: none of the {len(batches)} stored steps has a trainable token")
    return batches


def _batches(run: StoredRun) -> Iterator[ReplayBatch]:
    for expected, (step, _) in enumerate(run.rollout_refs(), start=1):
        if step != expected:
            raise DataError(
                f"run {run.reference}: the rollouts of step {expected} are missing from {run.paths.rollout_index}; "
                "replay starts at the base model and needs every step from 1 on"
            )
        stored = run.rollouts(step)
        yield ReplayBatch(
            step=step, groups=stored.groups, assessments=stored.assessments, content_digest=stored.content_digest
        )


def _by_pair(steps: Sequence[ReplayStep]) -> list[list[ReplayStep]]:
    """Steps of each pair of trainers, in the order they were taken."""
    pairs: dict[tuple[str, str], list[ReplayStep]] = {}
    for step in steps:
        pairs.setdefault((step.name_a, step.name_b), []).append(step)
    return list(pairs.values())


def _compare(config: RunConfig, reference: FreeMeasurement, other: FreeMeasurement) -> FreeRunning:
    """`other` against `reference`, and each of them against itself with other splits."""
    cap = config.algorithm.correction_cap

    def steps(a: str, b: str) -> tuple[FreeStep, ...]:
        return compare_trajectories(read_trajectory(Path(a)), read_trajectory(Path(b)), cap=cap, read=StateFile)

    return FreeRunning(
        steps=steps(other.configured, reference.configured),
        floors=tuple(steps(split, one.configured) for one in (reference, other) for split in one.others),
    )


@contextmanager
def _scratch(run: StoredRun) -> Iterator[Path]:
    """A folder that driver and ranks see, gone afterwards."""
    with storage_errors(run.paths.run, setting=_SETTING):
        scratch = TemporaryDirectory(prefix="replay-", dir=run.paths.run)
    with scratch as folder:
        yield Path(folder)
