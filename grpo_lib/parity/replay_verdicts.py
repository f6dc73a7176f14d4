"""Every rule of a replay: what is checked, against which tolerance, on how much evidence.

| check | value | tolerance | needs |
|---|---|---|---|
| advantages are those of the stored rewards | groups where they are not | 0 | 1 group |
| samples are of their step's policy version | samples that are not | 0 | 1 sample |
| samples were drawn with the run's seed | samples that were not | 0 | 1 sample |
| identical inputs | steps whose sides, or whose stored table, have another hash | 0 | 1 step |
| one optimiser step per step | violations on either side, or steps that moved no weight | 0 | 1 step |
| learning rate is the configured one, each side | steps off the schedule | 0 | 1 step |
| learning rate is equal | largest relative difference | 1e-9 | 1 step |
| lockstep: max abs. logprob difference, loss | worst step | `parity.replay_max_abs` | `parity.replay_steps` |
| lockstep: gradient, its norm, weights | worst step, relative L2 | `parity.replay_relative` | `parity.replay_steps` |
| lockstep: update | worst step, relative L2 | 1000 x `parity.replay_relative` | `parity.replay_steps` |
| lockstep: fp32 master weights | share of moved weights that bfloat16 holds | 0.01 | 1 side that moved |
| free-running: mean logprob difference, weights | multiple of floor | `parity.noise_factor` | `parity.replay_steps` |
| free-running: weights at the end | relative L2 | `parity.free_weight_relative` | `parity.replay_steps` |

A step is all evidence of one optimiser step: every trained token and every weight. Where the noise floor is still 0,
because a backend has given itself the same numbers bit for bit so far, there is nothing to take a multiple of; such a
step is held to lockstep's tolerance, which is what it is: both trainers are then no further than one step's rounding
from common weights. The other rules are those of `verdicts`: a violation FAILs however little was seen, and too little
evidence is never a PASS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from grpo_lib.config import ParityConfig, TrainerConfig
from grpo_lib.parity.distances import StateDistance
from grpo_lib.parity.free_running import QUANTITIES, FreeRunning, FreeStep
from grpo_lib.parity.replay import ReplayStep
from grpo_lib.parity.replay_inputs import InputAudit
from grpo_lib.parity.verdicts import check, listed, schedule_check
from grpo_lib.types import ParityCheck

_EQUAL_RATES = 1e-9
# Of fp32 values one in 2^16 has the 16 zero bits that make it a bfloat16 one; of bfloat16 master weights all have.
_BFLOAT16_SHARE = 0.01
# AdamW divides a gradient by the root of its second moment: where both are rounding noise, two correct trainers step in
# any direction. A wrong coefficient, clip or decay changes the update by a tenth and more.
_UPDATE_FACTOR = 1000

AnyStep = ReplayStep | FreeStep


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRule:
    """One tolerance that every lockstep step must keep."""

    label: str
    value: Callable[[ReplayStep], float]
    tolerance: Callable[[ParityConfig], float]
    where: Callable[[ReplayStep], str]


LOCKSTEP_RULES = (
    StepRule(
        label="max |dlogprob|",
        value=lambda step: math.nan if step.pair.nan_count else step.pair.max_abs,
        tolerance=lambda config: config.replay_max_abs,
        where=lambda step: f"{step.pair.nan_count:,} non-finite" if step.pair.nan_count else step.pair.worst,
    ),
    StepRule(
        label="loss",
        value=lambda step: abs(step.loss_a - step.loss_b),
        tolerance=lambda config: config.replay_max_abs,
        where=lambda step: f"{step.loss_a:.9g} and {step.loss_b:.9g}",
    ),
    StepRule(
        label="relative gradient distance",
        value=lambda step: step.gradient.whole.relative,
        tolerance=lambda config: config.replay_relative,
        where=lambda step: _farthest(step.gradient),
    ),
    StepRule(
        label="gradient norm",
        value=lambda step: _relative(step.grad_norm_a, step.grad_norm_b),
        tolerance=lambda config: config.replay_relative,
        where=lambda step: f"{step.grad_norm_a:.9g} and {step.grad_norm_b:.9g}",
    ),
    StepRule(
        label="relative weight distance",
        value=lambda step: step.weight.whole.relative,
        tolerance=lambda config: config.replay_relative,
        where=lambda step: _farthest(step.weight),
    ),
    StepRule(
        label="relative update distance",
        value=lambda step: step.update.whole.relative,
        tolerance=lambda config: _UPDATE_FACTOR * config.replay_relative,
        where=lambda step: _farthest(step.update),
    ),
)

# Quantities of free-running that have a rule, and the tolerance of lockstep that stands in for a floor of 0. The
# largest logprob difference has none, because one token decides it: the embedded model was up to 3.7 of its own floors
# from itself there, but 2.2 in the mean and 1.1 in the weights (8 splits against the floor of two others, 20 steps).
_FLOOR_RULES: Mapping[str, Callable[[ParityConfig], float]] = {
    "mean |dlogprob|": lambda config: config.replay_max_abs,
    "relative weight distance": lambda config: config.replay_relative,
}


def input_checks(audits: Sequence[InputAudit]) -> list[ParityCheck]:
    """The stored steps are what their run says that it drew and judged."""
    groups, samples = sum(audit.num_groups for audit in audits), sum(audit.num_samples for audit in audits)
    rules = (
        ("advantages are those of the stored rewards", lambda audit: audit.wrong_advantages, groups, "groups"),
        ("samples are of their step's policy version", lambda audit: audit.wrong_versions, samples, "samples"),
        ("samples were drawn with the run's seed", lambda audit: audit.wrong_seeds, samples, "samples"),
    )
    checks = []
    for name, wrong_of, count, unit in rules:
        wrong = [f"step {audit.step}: {listed(wrong_of(audit))}" for audit in audits if wrong_of(audit)]
        checks.append(
            check(
                name,
                sum(len(wrong_of(audit)) for audit in audits),
                0.0,
                num_observations=count,
                needed=1,
                evidence=listed(wrong) if wrong else f"{count:,} {unit} of {len(audits):,} steps",
            )
        )
    return checks


def lockstep_checks(
    steps: Sequence[ReplayStep], config: ParityConfig, trainer: TrainerConfig, *, stored: Mapping[int, str]
) -> list[ParityCheck]:
    """One pair of trainers in lockstep.

    Args:
        stored: Step → hash of its table as it is stored now.
    """
    pair = f"{steps[0].name_a} vs {steps[0].name_b}"
    changed = [step for step in steps if stored.get(step.step) != step.content_digest]
    return [
        *_record_checks("lockstep", pair, steps, trainer, changed),
        *(_worst_step(f"lockstep: {rule.label}, {pair}", rule, steps, config) for rule in LOCKSTEP_RULES),
        _master_check(f"lockstep: fp32 master weights, {pair}", steps),
    ]


def free_checks(free: FreeRunning, config: ParityConfig, trainer: TrainerConfig) -> list[ParityCheck]:
    """Two trainers on their own ways, in multiples of the noise floor."""
    last = free.steps[-1]
    return [
        *_record_checks("free-running", free.pair, free.steps, trainer, []),
        *(_floor_check(quantity, free, config) for quantity in _FLOOR_RULES),
        check(
            f"free-running: weights after the last step, {free.pair}",
            last.weight.whole.relative,
            config.free_weight_relative,
            num_observations=len(free.steps),
            needed=config.replay_steps,
            evidence=f"after step {last.step}: {_farthest(last.weight)}",
        ),
    ]


def multiples(free: FreeRunning, quantity: str, unmeasured: float) -> list[float]:
    """Each step's difference in multiples of its noise floor.

    Args:
        unmeasured: What stands in for a floor of 0.
    """
    values = (QUANTITIES[quantity](step) for step in free.steps)
    return [value / (floor or unmeasured) for value, floor in zip(values, free.floor(quantity), strict=True)]


def _floor_check(quantity: str, free: FreeRunning, config: ParityConfig) -> ParityCheck:
    tolerance = _FLOOR_RULES[quantity](config)
    found = multiples(free, quantity, tolerance / config.noise_factor)
    worst = max(range(len(found)), key=lambda index: _badness(found[index]))
    floors, step = free.floor(quantity), free.steps[worst]
    unmeasured = sum(floor == 0 for floor in floors)
    return check(
        f"free-running: {quantity} over noise floor, {free.pair}",
        found[worst],
        config.noise_factor,
        num_observations=len(found),
        needed=config.replay_steps,
        evidence=f"step {step.step}: {QUANTITIES[quantity](step):.3g} at a floor of {floors[worst]:.3g}; weights: "
        f"{_farthest(step.weight)}"
        + (f"; {unmeasured} steps without a floor held to {tolerance:g}" if unmeasured else ""),
    )


def _record_checks(
    mode: str, pair: str, steps: Sequence[AnyStep], trainer: TrainerConfig, changed: Sequence[AnyStep]
) -> list[ParityCheck]:
    """Inputs, optimiser steps and learning rates of both sides."""
    unequal = [f"step {step.step}" for step in steps if step.inputs_a != step.inputs_b]
    unequal += [f"step {step.step}, whose stored table has changed since" for step in changed]
    broken = [problem for step in steps for problem in _broken_steps(step)]
    rates = max(steps, key=lambda step: _badness(_relative(step.learning_rate_a, step.learning_rate_b)))
    return [
        check(
            f"{mode}: identical inputs, {pair}",
            len(unequal),
            0.0,
            num_observations=len(steps),
            needed=1,
            evidence=listed(unequal) if unequal else f"sha256 of the first {steps[0].inputs_b}",
        ),
        check(
            f"{mode}: one optimiser step per step, {pair}",
            len(broken),
            0.0,
            num_observations=len(steps),
            needed=1,
            evidence=listed(broken) if broken else f"{len(steps):,} steps, weights moved on both sides",
        ),
        *(_side_schedule(mode, side, steps, trainer) for side in "ab"),
        check(
            f"{mode}: learning rate is equal, {pair}",
            _relative(rates.learning_rate_a, rates.learning_rate_b),
            _EQUAL_RATES,
            num_observations=len(steps),
            needed=1,
            evidence=f"step {rates.step}: {rates.learning_rate_a:.9g} and {rates.learning_rate_b:.9g}",
        ),
    ]


def _side_schedule(mode: str, side: str, steps: Sequence[AnyStep], trainer: TrainerConfig) -> ParityCheck:
    rows = [
        {
            "step": step.step,
            "policy_version": step.policy_version + 1,
            "optim/applied": 1.0,
            "optim/lr": getattr(step, f"learning_rate_{side}"),
        }
        for step in steps
    ]
    name = getattr(steps[0], f"name_{side}")
    found = schedule_check(rows, trainer)
    return replace(found, name=f"{mode}: {found.name}, {name} ({side})")


def _broken_steps(step: AnyStep) -> Iterable[str]:
    for name, version, moved in (
        (step.name_a, step.version_after_a, step.moved_a),
        (step.name_b, step.version_after_b, step.moved_b),
    ):
        if version != step.policy_version + 1:
            yield f"{name} went from version {step.policy_version} to {version} in step {step.step}"
        if not moved:
            yield f"{name} moved no weight in step {step.step}"


def _worst_step(name: str, rule: StepRule, steps: Sequence[ReplayStep], config: ParityConfig) -> ParityCheck:
    worst = max(steps, key=lambda step: _badness(rule.value(step)))
    over = sum(not rule.value(step) <= rule.tolerance(config) for step in steps)
    return check(
        name,
        rule.value(worst),
        rule.tolerance(config),
        num_observations=len(steps),
        needed=config.replay_steps,
        evidence=f"step {worst.step}: {rule.where(worst)}" + (f"; {over} of {len(steps)} steps over" if over else ""),
    )


def _master_check(name: str, steps: Sequence[ReplayStep]) -> ParityCheck:
    """A side that moved nothing has no share; that it did not move is another check's finding."""
    shares = [
        (share, f"{trainer} in step {step.step}")
        for step in steps
        for trainer, share in ((step.name_a, step.bf16_share_a), (step.name_b, step.bf16_share_b))
        if not math.isnan(share)
    ]
    share, where = max(shares, default=(math.nan, "nothing moved"))
    return check(
        name,
        share,
        _BFLOAT16_SHARE,
        num_observations=len(shares),
        needed=1,
        evidence=f"largest share of moved weights that bfloat16 holds: {where}",
    )


def _relative(a: float, b: float) -> float:
    return abs(a - b) / abs(b) if b else math.inf if a else 0.0


def _badness(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _farthest(distance: StateDistance) -> str:
    tensor = distance.tensors[0]
    return f"{tensor.name} farthest ({tensor.relative:.3g}); all {_direction(distance)}"


def _direction(distance: StateDistance) -> str:
    whole = distance.whole
    return f"{whole.relative:.3g} apart, cosine {whole.cosine:.6f}, scale {whole.scale:.6f}"
