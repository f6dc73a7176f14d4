"""`start` of the nightly gate: one config per trainer, and every name the user gave, checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_lib.config import RunConfig, resolve, with_overrides
from grpo_lib.errors import ConfigError, DataError, PreflightError
from grpo_lib.parity.finished_run import check_side
from grpo_lib.preflight import Machine
from grpo_lib.recipes import default_recipe
from grpo_lib.stages import begin
from grpo_lib.stages.begin import RunSetup
from grpo_lib.stages.stored_run import StoredRun, open_run

# What may differ from the run that sampled the rollouts: how they are judged, and where this happens.
_FREE_SECTIONS = ("parity", "deadlines", "runtime", "storage")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParitySetup:
    """What `start` decided."""

    run: RunSetup  # of the first trainer, which also makes the rollouts
    trainers: tuple[str, ...]
    rollouts: str | None  # folder of the run whose rollouts are taken
    runs_a: tuple[str, ...]  # folders of finished runs to compare
    runs_b: tuple[str, ...]


def run(
    *,
    recipe: str | None,
    overrides: Sequence[str],
    trainers: Sequence[str],
    seed: int | None,
    rollouts: str | None,
    runs_a: Sequence[str] = (),
    runs_b: Sequence[str] = (),
    pool: Mapping[str, Any] | None = None,
) -> ParitySetup:
    """Resolve the configuration, open every run that is named, and check the machine for each trainer.

    Args:
        recipe: The default recipe when absent. With `rollouts` the configuration is that run's.
        trainers: Backends; the first is the leader.
        pool: The profile's pool that training will run on; this machine when absent.

    Raises:
        ConfigError: every broken rule at once.
        DataError: a named run does not exist, or lacks what is needed of it.
        PreflightError: the machine falls short.
    """
    if len(trainers) < 2 or len(set(trainers)) < len(trainers):
        raise ConfigError(
            [f"--trainers ({','.join(trainers)}): name two different trainers, such as olmo_core,hf_deepspeed"]
        )
    if bool(runs_a) != bool(runs_b):
        raise ConfigError(["--runs-a and --runs-b come together: finished runs of one set-up and of the other"])
    side_a, side_b = _finished("A", runs_a), _finished("B", runs_b)
    source = None if rollouts is None else open_run(rollouts)
    if source is None:
        config = _fresh(recipe or default_recipe.__name__, overrides, trainer=trainers[0], seed=seed)
    else:
        config = _stored(source, overrides, recipe=recipe, seed=seed)
    setups = [
        begin.check(with_overrides(config, [f"trainer.backend={name}"]), pool=pool, steps_use_store=False)
        for name in trainers
    ]
    if source is not None:
        _check_content(source, config)
    _check_both_fit(config, setups[0].preflight.machine)
    return ParitySetup(
        run=setups[0],
        trainers=tuple(trainers),
        rollouts=None if source is None else str(source.paths.run),
        runs_a=side_a,
        runs_b=side_b,
    )


def _finished(side: str, references: Sequence[str]) -> tuple[str, ...]:
    """Folders of one side's runs, which are finished and belong together."""
    if not references:
        return ()
    from grpo_lib.stages.parity_compare import finished  # its statistics cost seconds that most nights do without

    runs = [open_run(reference) for reference in references]
    check_side(side, [finished(run) for run in runs])
    return tuple(str(run.paths.run) for run in runs)


def _fresh(recipe: str, overrides: Sequence[str], *, trainer: str, seed: int | None) -> RunConfig:
    """Of a run with as many steps as are replayed."""
    if any(_key(text) == "loop.steps" for text in overrides):
        raise ConfigError(["loop.steps is parity.replay_steps here: fresh rollouts are those that are replayed"])
    config = resolve(recipe, overrides, trainer=trainer, seed=seed)
    return with_overrides(config, [f"loop.steps={config.parity.replay_steps}"])


def _stored(source: StoredRun, overrides: Sequence[str], *, recipe: str | None, seed: int | None) -> RunConfig:
    """Of the run that sampled the rollouts; what it sampled cannot be changed any more."""
    problems = [
        f"--set {text}: the rollouts of {source.run_id} were sampled as they were; with --rollouts only settings of "
        f"{', '.join(_FREE_SECTIONS)} can be set"
        for text in overrides
        if _key(text).partition(".")[0] not in _FREE_SECTIONS
    ]
    for option, value, stored in (("--recipe", recipe, source.config.recipe), ("--seed", seed, source.config.seed)):
        if value is not None and value != stored:
            problems.append(f"{option} ({value}) is not that of the rollouts: {source.run_id} has {stored}")
    if problems:
        raise ConfigError(problems)
    return with_overrides(source.config, overrides)


def _key(override: str) -> str:
    return override.partition("=")[0].strip()


def _check_content(source: StoredRun, config: RunConfig) -> None:
    """The run has what replay and probe need."""
    stored, needed = len(source.rollout_refs()), config.parity.replay_steps
    if stored < needed:
        raise DataError(
            f"run {source.reference} stored {stored} steps and parity.replay_steps is {needed}; name a longer run, or "
            f"--set parity.replay_steps={stored}"
        )
    source.probe_rollouts()
    if not source.paths.export.is_dir():
        raise DataError(f"run {source.reference} has no exported model: {source.paths.export} is missing")


def _check_both_fit(config: RunConfig, machine: Machine) -> None:
    """In lockstep two trainers are live, and no engine is."""
    ranks, runtime = 2 * config.trainer.num_ranks, config.runtime
    for unit, each, there in (
        ("CPU", runtime.cpus_per_rank, machine.cpus),
        ("GPU", runtime.gpus_per_rank, float(machine.gpus)),
    ):
        if ranks * each > there:
            raise PreflightError(
                f"lockstep replay keeps two trainers live: {ranks} ranks x {each:g} = {ranks * each:g} {unit}s of "
                f"{there:g}; lower trainer.num_ranks or runtime.{unit.lower()}s_per_rank"
            )
