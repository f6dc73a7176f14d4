"""The parts of the nightly gate, one for each step of its flow."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_lib.config import RunConfig
from grpo_lib.parity.free_running import FreeRunning
from grpo_lib.parity.replay import ReplayStep
from grpo_lib.stages import (
    frozen_rollouts,
    parity_bisect,
    parity_compare,
    parity_history,
    parity_probe,
    parity_replay,
)
from grpo_lib.stages.frozen_rollouts import FrozenRollouts
from grpo_lib.stages.live import live_trainer
from grpo_lib.stages.parity_begin import ParitySetup
from grpo_lib.stages.parity_probe import ScorerMeasurement
from grpo_lib.stages.parity_replay import FreeMeasurement
from grpo_lib.stages.run_paths import RunPaths, clear
from grpo_lib.stages.stored_run import open_run, write_parity
from grpo_lib.storage.refs import StoreRef
from grpo_lib.types import ParityVerdict


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMeasurement:
    """What one trainer did with the frozen rollouts, by reference."""

    trainer: str
    digest: str  # of the rollouts that it read
    score: ScorerMeasurement  # of the probe rollouts
    free: FreeMeasurement  # its own way through the stored steps, and the same with another micro-batch split
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The trainers against each other, as far as no process is needed."""

    probe: dict[str, Any]  # `parity.report.to_dict`: every pair of scorers under the weights that sampled
    free: tuple[FreeRunning, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lockstep:
    """Every stored step, taken by the leader and by each follower from the leader's state."""

    steps: tuple[ReplayStep, ...]
    causes: dict[str, list[dict[str, Any]]]  # tables of a bisect; empty unless the replay FAILs
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GateReport:
    """The night's report, all plain data."""

    parity: dict[str, Any]  # `parity.report.to_dict`, with the table `drift`
    drift_lines: list[str]  # for a terminal
    seconds: dict[str, float]


def measure(config: RunConfig, paths: RunPaths, frozen: FrozenRollouts, *, trainer: str) -> TrainerMeasurement:
    """One trainer alone on the frozen rollouts; what an earlier attempt of it left goes first."""
    started = time.perf_counter()
    run = frozen.open(config)
    folder = paths.replay / trainer
    clear(folder)
    digest = frozen_rollouts.rollouts_digest(run, steps=frozen.steps)
    with live_trainer(parity_replay.with_backend(config, trainer), model_path=run.model_path) as (live, _):
        free = parity_replay.measure_live(run, live, folder=folder)
        score = parity_probe.measure_live(run, live, store=paths.store)
    # Only an artifact of the flow mentions the scores, and the step that judges them may be resumed much later.
    paths.mirror().refer(f"scores-{trainer}", StoreRef.from_dict(score.scores))
    seconds = time.perf_counter() - started
    return TrainerMeasurement(trainer=trainer, digest=digest, score=score, free=free, seconds=seconds)


def join(
    config: RunConfig, paths: RunPaths, frozen: FrozenRollouts, *, measurements: Sequence[TrainerMeasurement]
) -> Joined:
    """Judge the scores, a plain forward's among them, compare the trajectories, and remove their dumps.

    Raises:
        DataError: a trainer read other rollouts than the frozen ones.
    """
    started = time.perf_counter()
    frozen_rollouts.check_digests(frozen, {one.trainer: one.digest for one in measurements})
    run = frozen.open(config)
    engine = [] if frozen.engine_score is None else [frozen.engine_score]
    plain = parity_probe.measure(run, scorer=parity_probe.PLAIN, store=paths.store)
    scores = [*engine, *(one.score for one in measurements), plain]
    probe = parity_probe.judge(run, scores)
    free = parity_replay.compare(run, [one.free for one in measurements])
    clear(paths.replay)
    return Joined(probe=probe, free=free, seconds=time.perf_counter() - started)


def lockstep(
    config: RunConfig, frozen: FrozenRollouts, *, trainers: Sequence[str], free: Sequence[FreeRunning]
) -> Lockstep:
    """The first trainer and each other one side by side; a replay that FAILs is bisected here, where trainers can be.

    Args:
        free: From `join`; judged with the steps.
    """
    started = time.perf_counter()
    run = frozen.open(config)
    leader, *followers = trainers
    steps = [step for follower in followers for step in parity_replay.lockstep(run, leader=leader, follower=follower)]
    judged = parity_replay.judge(run, lockstep=steps, free=free)
    causes = parity_bisect.causes_of(judged, run, trainers=trainers)
    return Lockstep(steps=tuple(steps), causes=causes, seconds=time.perf_counter() - started)


def report(
    config: RunConfig,
    paths: RunPaths,
    frozen: FrozenRollouts,
    *,
    run_id: str,
    lineage: Mapping[str, Any],
    measurements: Sequence[TrainerMeasurement],
    joined: Joined,
    lockstep: Lockstep,
) -> GateReport:
    """The verdict; the report and the night are written down. Nothing is raised for a FAIL."""
    started = time.perf_counter()
    trainers = [one.trainer for one in measurements]
    run = frozen.open(config)
    replayed = parity_replay.judge(run, lockstep=lockstep.steps, free=joined.free)
    parity = _merged(parity_bisect.with_causes(replayed, lockstep.causes), joined.probe)
    seconds = {
        "rollouts": frozen.seconds,
        **{f"measure {one.trainer}": one.seconds for one in measurements},
        "join": joined.seconds,
        "lockstep": lockstep.seconds,
        "judge": time.perf_counter() - started,
    }
    night = parity_history.run(config, parity, run_id=run_id, trainers=trainers, lineage=lineage, seconds=seconds)
    parity["tables"]["drift"] = night.drift
    write_parity(paths, parity)
    return GateReport(parity=parity, drift_lines=night.lines, seconds=seconds)


def compare(config: RunConfig, setup: ParitySetup) -> dict[str, Any]:
    """The report on the finished runs that were named, under the tolerances of `config`."""
    side_a, side_b = (
        [replace(run, config=run.config.model_copy(update={"parity": config.parity})) for run in map(open_run, folders)]
        for folders in (setup.runs_a, setup.runs_b)
    )
    return parity_compare.run(side_a, side_b)


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Two reports of `to_dict` as one; a row that stands in both tables of a name stands once."""
    verdicts = {first["verdict"], second["verdict"]}
    worst = next(
        (one for one in (ParityVerdict.FAIL, ParityVerdict.INCONCLUSIVE) if one in verdicts), ParityVerdict.PASS
    )
    tables: dict[str, list[Any]] = {}
    for name, rows in (*first["tables"].items(), *second["tables"].items()):
        kept = tables.setdefault(name, [])
        kept += [row for row in rows if row not in kept]
    return {"verdict": str(worst), "checks": [*first["checks"], *second["checks"]], "tables": tables}
