"""Every rule of a replay passes on good evidence, fails when what it guards is broken, never passes on too little."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from grpo_lib.config import RunConfig, resolve
from grpo_lib.parity.distances import StateDistance, TensorDistance
from grpo_lib.parity.free_running import QUANTITIES, FreeRunning, FreeStep
from grpo_lib.parity.probe import ENGINE_DECODE, ENGINE_SCORE, PairStatistics, compare
from grpo_lib.parity.replay import ReplayStep
from grpo_lib.parity.replay_inputs import InputAudit
from grpo_lib.parity.replay_verdicts import LOCKSTEP_RULES, multiples
from grpo_lib.parity.report import REPLAY_LIMITS, probe_report, render, replay_report, to_dict
from grpo_lib.types import ParityCheck, ParityReport, ParityVerdict

PASS, FAIL, INCONCLUSIVE = ParityVerdict.PASS, ParityVerdict.FAIL, ParityVerdict.INCONCLUSIVE
NUM_STEPS = 5
RUN = resolve("embedded_addition", [f"parity.replay_steps={NUM_STEPS}"])
LR = RUN.trainer.learning_rate
STORED = {step: f"table {step}" for step in range(1, NUM_STEPS + 1)}


def pair(difference: float = 1e-6) -> PairStatistics:
    base = np.full(100, -1.0)
    return compare(
        "hf_deepspeed", {"e0.p/3": np.r_[base[:99], -1.0 + difference]}, "olmo_core", {"e0.p/3": base}, cap=2.0
    )


def distance(relative: float = 1e-7, tensor: str = "model.norm.weight") -> StateDistance:
    whole = TensorDistance(name="all", norm_a=1.0, norm_b=1.0, relative=relative, cosine=0.5, scale=0.25)
    return StateDistance(whole=whole, tensors=(replace(whole, name=tensor, relative=2 * relative),))


def taken(step: int, **changes: Any) -> ReplayStep:
    good = ReplayStep(
        step=step,
        policy_version=step - 1,
        name_a="hf_deepspeed",
        name_b="olmo_core",
        content_digest=STORED[step],
        inputs_a=f"samples {step}",
        inputs_b=f"samples {step}",
        pair=pair(),
        loss_a=0.1,
        loss_b=0.1,
        grad_norm_a=2.0,
        grad_norm_b=2.0,
        learning_rate_a=LR,
        learning_rate_b=LR,
        version_after_a=step,
        version_after_b=step,
        moved_a=True,
        moved_b=True,
        gradient=distance(),
        weight=distance(),
        update=distance(),
        bf16_share_a=2e-5,
        bf16_share_b=2e-5,
    )
    return replace(good, **changes)


def free_step(step: int, *, differs: float = 1e-6, **changes: Any) -> FreeStep:
    good = FreeStep(
        step=step,
        policy_version=step - 1,
        name_a="hf_deepspeed",
        name_b="olmo_core",
        inputs_a=f"samples {step}",
        inputs_b=f"samples {step}",
        pair=pair(100 * differs),  # one of 100 tokens, so `differs` is the mean
        loss_a=0.1,
        loss_b=0.1,
        grad_norm_a=2.0,
        grad_norm_b=2.0,
        learning_rate_a=LR,
        learning_rate_b=LR,
        version_after_a=step,
        version_after_b=step,
        moved_a=True,
        moved_b=True,
        weight=distance(differs),
    )
    return replace(good, **changes)


def free(
    *, differs: Sequence[float] = (2e-6,) * NUM_STEPS, floor: Sequence[float] = (1e-6,) * NUM_STEPS
) -> FreeRunning:
    def steps(values: Sequence[float]) -> tuple[FreeStep, ...]:
        return tuple(free_step(step, differs=value) for step, value in enumerate(values, start=1))

    return FreeRunning(steps=steps(differs), floors=(steps(floor), steps([value / 2 for value in floor])))


def audit(step: int, **changes: Any) -> InputAudit:
    good = InputAudit(step=step, num_groups=16, num_samples=256, wrong_advantages=(), wrong_versions=(), wrong_seeds=())
    return replace(good, **changes)


def report(config: RunConfig = RUN, **changes: Any) -> ParityReport:
    evidence: dict[str, Any] = {
        "lockstep": [[taken(step) for step in STORED]],
        "free": [free()],
        "audits": [audit(step) for step in STORED],
        "stored": STORED,
    }
    return replay_report(config, **(evidence | changes))


def failing(found: ParityReport) -> dict[str, ParityCheck]:
    return {check.name.rpartition(", ")[0] or check.name: check for check in found.checks if check.verdict is FAIL}


def with_step(number: int, **changes: Any) -> list[list[ReplayStep]]:
    return [[taken(step, **(changes if step == number else {})) for step in STORED]]


def test_a_faithful_replay_passes() -> None:
    found = report()
    assert [check for check in found.checks if check.verdict is not PASS] == []
    assert found.verdict is PASS


@pytest.mark.parametrize(
    ("changes", "rule", "mention"),
    [
        ({"pair": pair(1.2e-5)}, "lockstep: max |dlogprob|", "step 3: e0.p/3 response token 99: "),
        ({"pair": pair(math.nan)}, "lockstep: max |dlogprob|", "step 3: 1 non-finite"),
        ({"loss_a": 0.10002}, "lockstep: loss", "step 3: 0.10002 and 0.1"),
        (
            {"gradient": distance(2e-5)},
            "lockstep: relative gradient distance",
            "step 3: model.norm.weight farthest (4e-05",
        ),
        ({"gradient": distance(math.nan)}, "lockstep: relative gradient distance", "step 3: model.norm.weight"),
        ({"grad_norm_a": 1.0}, "lockstep: gradient norm", "step 3: 1 and 2"),
        ({"weight": distance(2e-5)}, "lockstep: relative weight distance", "scale 0.250000"),
        ({"update": distance(0.1)}, "lockstep: relative update distance", "cosine 0.5"),
        ({"bf16_share_a": 0.99}, "lockstep: fp32 master weights", "hf_deepspeed in step 3"),
        ({"bf16_share_b": 0.99}, "lockstep: fp32 master weights", "olmo_core in step 3"),
        ({"inputs_a": "others"}, "lockstep: identical inputs", "step 3"),
        ({"content_digest": "another table"}, "lockstep: identical inputs", "step 3, whose stored table has changed"),
        (
            {"version_after_a": 2},
            "lockstep: one optimiser step per step",
            "hf_deepspeed went from version 2 to 2 in step 3",
        ),
        ({"version_after_b": 4}, "lockstep: one optimiser step per step", "olmo_core went from version 2 to 4"),
        ({"moved_a": False}, "lockstep: one optimiser step per step", "hf_deepspeed moved no weight in step 3"),
        ({"moved_b": False}, "lockstep: one optimiser step per step", "olmo_core moved no weight in step 3"),
    ],
)
def test_one_bad_step_fails_its_rule_and_is_named(changes: dict[str, Any], rule: str, mention: str) -> None:
    failed = failing(report(lockstep=with_step(3, **changes)))
    assert list(failed) == [rule]
    assert mention in failed[rule].evidence


def test_every_lockstep_rule_keeps_its_tolerance() -> None:
    """Values at the tolerance pass: the rules are limits, not wishes."""
    edge = taken(
        3,
        pair=pair(0.99e-5),
        loss_a=0.1 + 0.99e-5,
        gradient=distance(1e-5),
        grad_norm_a=2.0 * (1 + 0.99e-5),
        weight=distance(1e-5),
        update=distance(0.01),
    )
    assert failing(report(lockstep=[[edge if step == 3 else taken(step) for step in STORED]])) == {}
    assert len(LOCKSTEP_RULES) == 6


@pytest.mark.parametrize("side", ["a", "b"])
def test_a_linear_decay_in_place_of_a_constant_rate_names_the_side(side: str) -> None:
    steps = [taken(step, **{f"learning_rate_{side}": LR * (1 - step / 10)}) for step in STORED]
    failed = failing(report(lockstep=[steps]))
    assert set(failed) == {"lockstep: learning rate is the configured one", "lockstep: learning rate is equal"}
    name = {"a": "hf_deepspeed (a)", "b": "olmo_core (b)"}[side]
    assert failed["lockstep: learning rate is the configured one"].name.endswith(name)


def test_several_bad_steps_are_counted_and_the_worst_is_named() -> None:
    steps = [[taken(step, gradient=distance(step * 1e-4)) for step in STORED]]
    evidence = failing(report(lockstep=steps))["lockstep: relative gradient distance"].evidence
    assert evidence.startswith("step 5: ")
    assert evidence.endswith("5 of 5 steps over")


# -- free-running ------------------------------------------------------------------------------------------------------


def test_three_floors_pass_and_more_fail_at_the_step_that_exceeds() -> None:
    assert failing(report(free=[free(differs=(1e-6, 1e-6, 3e-6, 1e-6, 1e-6))])) == {}
    failed = failing(report(free=[free(differs=(1e-6, 1e-6, 3.1e-6, 1e-6, 1e-6))]))
    assert set(failed) == {
        "free-running: mean |dlogprob| over noise floor",
        "free-running: relative weight distance over noise floor",
    }
    check = failed["free-running: relative weight distance over noise floor"]
    assert check.value == pytest.approx(3.1)
    assert check.evidence.startswith("step 3: 3.1e-06 at a floor of 1e-06")


def test_a_floor_of_zero_is_held_to_one_steps_rounding() -> None:
    """At the first step both trainers hold the base weights and a split changes no score: there is no floor yet."""
    first = (9e-6, 1e-6, 1e-6, 1e-6, 1e-6)
    within = report(free=[free(differs=first, floor=(0.0, 1e-6, 1e-6, 1e-6, 1e-6))])
    assert failing(within) == {}
    assert "1 steps without a floor held to 1e-05" in next(
        check.evidence for check in within.checks if "mean |dlogprob|" in check.name
    )
    beyond = free(differs=(1.1e-5, *first[1:]), floor=(0.0, 1e-6, 1e-6, 1e-6, 1e-6))
    assert "free-running: mean |dlogprob| over noise floor" in failing(report(free=[beyond]))
    assert multiples(beyond, "mean |dlogprob|", 1e-5 / 3)[0] == pytest.approx(3.3)


def test_two_backends_without_any_noise_pass_only_if_they_agree() -> None:
    none = (0.0,) * NUM_STEPS
    assert failing(report(free=[free(differs=none, floor=none)])) == {}
    assert failing(report(free=[free(differs=(1e-3,) * NUM_STEPS, floor=none)])) != {}


def test_a_nan_is_a_violation_in_the_difference_and_in_the_floor() -> None:
    for changed in (free(differs=(1e-6, math.nan, 1e-6, 1e-6, 1e-6)), free(floor=(1e-6, math.nan, 1e-6, 1e-6, 1e-6))):
        failed = failing(report(free=[changed]))
        assert "free-running: relative weight distance over noise floor" in failed
        assert "free-running: mean |dlogprob| over noise floor" in failed


def test_weights_must_end_close_however_loud_the_noise() -> None:
    loud = free(differs=(2e-5,) * NUM_STEPS, floor=(1e-5,) * NUM_STEPS)
    failed = failing(report(free=[loud]))
    assert list(failed) == ["free-running: weights after the last step"]
    assert failed["free-running: weights after the last step"].evidence.startswith("after step 5: model.norm.weight")
    early = free(differs=(2e-5, 1e-6, 1e-6, 1e-6, 1e-6), floor=(1e-5,) * NUM_STEPS)
    assert failing(report(free=[early])) == {}, "only the last step decides"


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"inputs_a": "others"}, "free-running: identical inputs"),
        ({"moved_a": False}, "free-running: one optimiser step per step"),
        ({"version_after_b": 7}, "free-running: one optimiser step per step"),
        ({"learning_rate_a": LR / 2, "learning_rate_b": LR / 2}, "free-running: learning rate is the configured one"),
    ],
)
def test_the_record_of_a_free_run_is_judged_too(changes: dict[str, Any], rule: str) -> None:
    good = free()
    steps = tuple(free_step(step.step, differs=2e-6, **(changes if step.step == 2 else {})) for step in good.steps)
    assert list(failing(report(free=[replace(good, steps=steps)]))) == [rule]


# -- inputs and power --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "rule"),
    [
        ("wrong_advantages", "advantages are those of the stored rewards"),
        ("wrong_versions", "samples are of their step's policy version"),
        ("wrong_seeds", "samples were drawn with the run's seed"),
    ],
)
def test_an_inconsistent_record_fails_by_name(field: str, rule: str) -> None:
    audits = [audit(step, **({field: ("e0.p1", "e0.p2")} if step == 2 else {})) for step in STORED]
    failed = failing(report(audits=audits))
    assert list(failed) == [rule]
    assert failed[rule].value == 2
    assert failed[rule].evidence == "step 2: e0.p1, e0.p2"


def test_too_few_steps_never_pass_and_still_fail() -> None:
    few = {"lockstep": [[taken(1), taken(2)]], "free": [free(differs=(1e-6, 1e-6), floor=(1e-6, 1e-6))]}
    found = report(**few)
    assert found.verdict is INCONCLUSIVE
    undecided = [check for check in found.checks if check.verdict is INCONCLUSIVE]
    assert len(undecided) == len(LOCKSTEP_RULES) + 3
    assert all("2 observations, 5 needed" in check.evidence for check in undecided)
    few["lockstep"] = [[taken(1), taken(2, gradient=distance(1.0))]]
    assert report(**few).verdict is FAIL


def test_nothing_that_moved_has_no_share_of_bfloat16() -> None:
    steps = [
        [taken(step, bf16_share_a=math.nan, bf16_share_b=math.nan, moved_a=False, moved_b=False) for step in STORED]
    ]
    found = report(lockstep=steps)
    assert list(failing(found)) == ["lockstep: one optimiser step per step"]
    (share,) = [check for check in found.checks if "fp32 master weights" in check.name]
    assert share.verdict is INCONCLUSIVE


def test_several_followers_are_judged_each_for_itself() -> None:
    bad = [taken(step, name_a="other", moved_a=False) for step in STORED]
    failed = [
        check.name for check in report(lockstep=[[taken(step) for step in STORED], bad]).checks if check.verdict is FAIL
    ]
    assert failed == ["lockstep: one optimiser step per step, other vs olmo_core"]


# -- the report --------------------------------------------------------------------------------------------------------


def test_tables_have_a_row_per_step_and_the_limits_go_along() -> None:
    found = report(lockstep=[[taken(step) for step in (1, 2, 4)]], free=[])
    plain = to_dict(found)
    assert [row["step"] for row in plain["tables"]["lockstep"]] == [1, 2, 4]
    assert [(row["step"], row["trained"]) for row in plain["tables"]["inputs"]] == [
        (1, True), (2, True), (3, False), (4, True), (5, False),
    ]  # fmt: skip
    assert {row["metric"] for row in plain["tables"]["limits"]} == set(REPLAY_LIMITS)
    rows = to_dict(report())["tables"]["free_running"]
    assert len(rows) == NUM_STEPS
    assert all(rows[0][f"floor of {quantity}"] is not None for quantity in QUANTITIES)
    assert "lockstep: relative gradient distance" in render(plain)


def test_a_probe_asks_for_the_engines_own_pair_only_where_it_can_score() -> None:
    run = resolve("embedded_addition", ["parity.min_tokens=50"])
    base = np.full(100, -1.0)
    pairs = [compare("olmo_core", {"s": base}, ENGINE_DECODE, {"s": base}, cap=2.0)]
    rows = [{"optim/applied": 1.0, "batch/trained_tokens": 100.0, "mismatch/tis_clip_count": 0.0}]
    assert probe_report(run, pairs=pairs, metrics=rows, engine_scores=False).verdict is PASS
    assert probe_report(run, pairs=pairs, metrics=rows, engine_scores=True).verdict is INCONCLUSIVE
    pairs += [compare(ENGINE_SCORE, {"s": base + 1e-9}, ENGINE_DECODE, {"s": base}, cap=2.0)]
    assert probe_report(run, pairs=pairs, metrics=rows, engine_scores=True).verdict is FAIL
