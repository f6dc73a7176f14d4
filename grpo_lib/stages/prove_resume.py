"""`grpo run prove-resume`: steps in one go against the same steps with a kill in every phase."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open

from grpo_lib.config import RunConfig, with_overrides
from grpo_lib.errors import RankFailure
from grpo_lib.parity.distances import state_distance
from grpo_lib.parity.resume_proof import ProvenRun, other_ranks_checks, same_run_checks
from grpo_lib.parity.verdicts import check, listed
from grpo_lib.stages import begin
from grpo_lib.stages.adopt import adopt
from grpo_lib.stages.attempts import attempts_of
from grpo_lib.stages.begin import RunSetup
from grpo_lib.stages.checkpoints import newest_complete
from grpo_lib.stages.doomed_attempt import Death, DoomedAttempt
from grpo_lib.stages.run_diff import computed_metrics
from grpo_lib.stages.run_paths import RunPaths
from grpo_lib.stages.stored_run import StoredRun, open_run
from grpo_lib.types import ParityCheck, ParityReport

log = logging.getLogger(__name__)

# Every span of a step but the canary, which is not due in every step.
PHASES: tuple[str, ...] = (
    "wait_for_rollouts", "verify", "pack", "forward_backward", "optim", "weight_sync", "checkpoint", "record",
)  # fmt: skip
EPOCH_STEPS = 2  # where prompts are generated: with a checkpoint at every step, every other one ends an epoch
_MORE_STEPS = 12  # than the kills need, if each meets its phase at once
_TRIES = 3  # a phase may be over, this time, before the moment that was drawn
_FLOW = "ResumeProof"
_ATTEMPT_S = 1800.0
_LEFTOVERS_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One kill, as it happened."""

    phase: str  # that was meant
    step: int
    hit: str  # step and phase that the process last reported
    resumed_from: int  # steps done in the newest checkpoint that was left; 0 where there was none


@dataclass(kw_only=True)
class _Subject:
    """One run of the proof, with everything that was started for it."""

    paths: RunPaths
    kills: list[Kill] = field(default_factory=list)
    attempts: list[DoomedAttempt] = field(default_factory=list)

    @property
    def log(self) -> Path:
        return self.paths.run.with_suffix(".log")

    def attempt(self, overrides: Sequence[str] = (), death: Death | None = None) -> DoomedAttempt:
        self.attempts.append(DoomedAttempt(self.paths, log=self.log, overrides=overrides, death=death))
        return self.attempts[-1]

    @property
    def resume_step(self) -> int:
        point = newest_complete(self.paths)
        return 0 if point is None else point.state.steps_done


def run(config: RunConfig, *, folder: Path, phases: Sequence[str] = PHASES, other_ranks: bool = True) -> ParityReport:
    """Prove it for one configuration. Every attempt is the real command in a process of its own.

    Args:
        folder: Where runs and logs go.
        phases: In each of which the run is killed once, at a random moment.
        other_ranks: Also continue with another number of ranks.

    Raises:
        RankFailure: an attempt that nobody killed failed; the message has the end of its output.
    """
    config = proof_config(config, num_kills=len(phases), root=folder)
    setup, name = begin.check(config), config.trainer.backend
    straight = _Subject(paths=begin.record(setup, f"{_FLOW}/{name}-straight"))
    _finish(straight)
    spans_s = _shortest_spans(open_run(str(straight.paths.run)), phases)
    killed = _Subject(paths=begin.record(setup, f"{_FLOW}/{name}-killed"))
    rng = random.Random(f"{config.seed} {name}")
    forks: list[_Subject] = []
    for number, phase in enumerate(phases):
        _kill_in(killed, phase, steps_ahead(number), span_s=spans_s[phase], rng=rng)
        if other_ranks and number == len(phases) // 2:
            forks = [_fork(killed, f"{name}-{kind}", setup) for kind in ("ranks", "noise")]
    _finish(killed)
    expected = proven_run(straight.paths)
    checks = [
        _kills_check(name, killed, phases),
        *same_run_checks(name, expected, proven_run(killed.paths), restored=_restored_versions(killed.paths)),
    ]
    if forks:
        checks += _other_ranks(name, config, expected, straight, *forks)
    checks.append(_leftovers_check(name, [straight, killed, *forks]))
    return ParityReport(checks=tuple(checks), tables={f"kills_{name}": [_row(kill) for kill in killed.kills]})


def proof_config(config: RunConfig, *, num_kills: int, root: Path) -> RunConfig:
    """The configuration with as many steps as the kills need, frequent checkpoints and short epochs."""
    overrides = [
        f"storage.root={root}",
        "storage.store=null",
        f"loop.steps={3 * num_kills + _MORE_STEPS}",
        "loop.checkpoint_every=1",
    ]
    if config.data.source == "addition":
        overrides.append(f"data.num_train={EPOCH_STEPS * config.loop.prompts_per_step}")
    return with_overrides(config, overrides)


def proven_run(paths: RunPaths) -> ProvenRun:
    """What a finished run left, read from its files."""
    stored = open_run(str(paths.run))
    rollouts = [
        (group, rollout.completion)
        for step, _ in stored.rollout_refs()
        for group in stored.rollouts(step).groups
        for rollout in group.rollouts
    ]
    weights: dict[str, str] = {}
    for file in sorted(paths.export.glob("*.safetensors")):
        with safe_open(file, framework="np") as tensors:
            weights |= {key: hashlib.sha256(tensors.get_tensor(key).tobytes()).hexdigest() for key in tensors.keys()}  # noqa: SIM118 - it is no dict
    return ProvenRun(
        rows=[computed_metrics(row) for row in stored.metrics()],
        prompts=[group.group_id for step, _ in stored.rollout_refs() for group in stored.rollouts(step).groups],
        samples=[
            (completion.request_id, completion.seed, completion.token_ids.tobytes()) for _, completion in rollouts
        ],
        certified=[(certificate.policy_version, certificate.checksum) for certificate in stored.certificates()],
        weights=weights,
    )


def _finish(subject: _Subject, overrides: Sequence[str] = ()) -> None:
    """One attempt that nobody kills."""
    ending = subject.attempt(overrides).wait(deadline_s=_ATTEMPT_S)
    if ending.code != 0:
        raise RankFailure(f"an attempt at {subject.paths.run} failed with exit code {ending.code}:\n{ending.output}")
    log.info("%s: all steps are done", subject.paths.run.name)


def steps_ahead(number: int) -> int:
    """After how many steps of its own an attempt dies.

    A checkpoint is written behind the two steps that follow it, so the third step of an attempt finds that of the
    first. One step more for every other kill brings it to both ends and middles of epochs.
    """
    return 3 + number % 2


def _kill_in(subject: _Subject, phase: str, ahead: int, *, span_s: float, rng: random.Random) -> None:
    """Attempts that die, until one died in the phase that was meant."""
    for number in range(_TRIES):
        step = subject.resume_step + ahead
        visit = 2 if phase == "checkpoint" else 1  # the first one in a step stores its rollouts
        death = Death(step=step, span=phase, visit=visit, delay_s=rng.random() * span_s / 10**number)
        ending = subject.attempt(death=death).wait(deadline_s=_ATTEMPT_S)
        if ending.last is None:
            raise RankFailure(f"an attempt at {subject.paths.run} ended before it was killed:\n{ending.output}")
        hit = f"step {ending.last.step}, {ending.last.span}"
        subject.kills.append(Kill(phase=phase, step=step, hit=hit, resumed_from=subject.resume_step))
        log.info("%s: killed in %s, to be continued after step %d", subject.paths.run.name, hit, subject.resume_step)
        if hit == f"step {step}, {phase}":
            return


def _fork(subject: _Subject, name: str, setup: RunSetup) -> _Subject:
    """Another run that goes on from where the subject stands."""
    paths = adopt(
        subject.paths,
        run_id=f"{_FLOW}/{name}",
        origins=[subject.paths.run_id],
        step="fit",
        config=setup.config,
        config_hash=setup.config_hash,
        lineage=setup.lineage,
    )
    return _Subject(paths=paths)


def _other_ranks(
    name: str, config: RunConfig, expected: ProvenRun, straight: _Subject, ranks: _Subject, noise: _Subject
) -> list[ParityCheck]:
    first_step = ranks.resume_step + 1
    num_ranks = 1 if config.trainer.num_ranks > 1 else 2
    _finish(ranks, [f"trainer.num_ranks={num_ranks}"])
    _finish(noise, [f"trainer.micro_batch_packs={2 if config.trainer.micro_batch_packs == 1 else 1}"])
    return other_ranks_checks(
        f"{name}, {config.trainer.num_ranks} -> {num_ranks} ranks",
        straight=expected,
        other=proven_run(ranks.paths),
        first_step=first_step,
        distance=_weight_distance(ranks.paths, straight.paths),
        noise=_weight_distance(noise.paths, straight.paths),
        config=config.parity,
    )


def _weight_distance(a: RunPaths, b: RunPaths) -> float:
    """Relative L2 distance of two exported models."""
    with (
        safe_open(next(a.export.glob("*.safetensors")), framework="pt") as of_a,
        safe_open(next(b.export.glob("*.safetensors")), framework="pt") as of_b,
    ):
        return state_distance(list(of_b.keys()), of_a.get_tensor, of_b.get_tensor).whole.relative


def _shortest_spans(stored: StoredRun, phases: Sequence[str]) -> dict[str, float]:
    """Seconds that a phase takes at least: a moment drawn from them is inside of it."""
    rows = stored.metrics()
    return {phase: min(row[f"time/{phase}_s"] for row in rows) for phase in phases}


def _restored_versions(paths: RunPaths) -> list[int]:
    return [line["policy_version"] for line in attempts_of(paths) if line["event"] == "continues"]


def _kills_check(name: str, subject: _Subject, phases: Sequence[str]) -> ParityCheck:
    hit = {kill.phase for kill in subject.kills if kill.hit == f"step {kill.step}, {kill.phase}"}
    missed = [phase for phase in phases if phase not in hit]
    boundary = [kill for kill in subject.kills if kill.resumed_from and kill.resumed_from % EPOCH_STEPS == 0]
    return check(
        f"{name}: a kill in every phase",
        len(missed),
        0,
        num_observations=len(subject.kills),
        needed=len(phases),
        evidence=f"{len(subject.kills)} kills, {len(boundary)} continued at an epoch's end; missed: {listed(missed)}",
    )


def _leftovers_check(name: str, subjects: Sequence[_Subject]) -> ParityCheck:
    attempts = [attempt for subject in subjects for attempt in subject.attempts]
    left = [process for attempt in attempts for process in attempt.leftovers(deadline_s=_LEFTOVERS_S)]
    return check(
        f"{name}: processes left behind",
        len(left),
        0,
        num_observations=len(attempts),
        needed=1,
        evidence=f"{len(attempts)} attempts; still there: {listed(left)}",
    )


def _row(kill: Kill) -> dict[str, object]:
    return {
        "phase": kill.phase,
        "meant_step": kill.step,
        "killed_in": kill.hit,
        "continued_after_step": kill.resumed_from,
    }
