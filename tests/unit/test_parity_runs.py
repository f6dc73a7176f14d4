"""Comparisons of finished runs: what is equal does not fail, what differs does, and too few seeds decide nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from grpo_lib.config import settings
from grpo_lib.errors import ConfigError, DataError
from grpo_lib.parity.finished_run import FREE, FinishedRun
from grpo_lib.parity.report import to_dict
from grpo_lib.parity.runs import COUNTS, compare_runs
from grpo_lib.parity.terminal import render_report
from grpo_lib.timing import SPANS
from grpo_lib.types import ParityCheck, ParityReport, ParityVerdict
from tests.unit.finished_runs import LINEAGE, SPAN_SECONDS, STEPS, make_run, side

PASS, FAIL, INCONCLUSIVE = ParityVerdict.PASS, ParityVerdict.FAIL, ParityVerdict.INCONCLUSIVE
A, B = (1, 2, 3, 4), (11, 12, 13, 14)
ACCURACY, LAST, SPEED = "held-out accuracy over seeds", "reward of the last steps", "correct rate over all steps"
SAMPLES, TIME = "same samples in the first step", "time spans have the same boundaries"


def failing(report: ParityReport) -> list[str]:
    return [check.name for check in report.checks if check.verdict is FAIL]


def found(report: ParityReport, name: str) -> ParityCheck:
    return next(check for check in report.checks if check.name == name)


def spans(report: ParityReport) -> dict[str, Any]:
    return {str(row["span"]): row for row in report.tables["time"]}


def edited(runs: Sequence[FinishedRun], **changes: Any) -> list[FinishedRun]:
    """With some values of every metrics row replaced."""
    return [replace(run, rows=[{**row, **changes} for row in run.rows]) for run in runs]


# ---- verdicts


def test_equal_set_ups_with_enough_seeds_pass() -> None:
    report = compare_runs(side(A), side(B))
    assert [check for check in report.checks if check.verdict is not PASS] == []
    assert report.verdict is PASS


def test_false_alarms_on_equal_set_ups() -> None:
    """20 repetitions with other seeds, three a side that scatter by 0.02: none fails, and 8 are decided."""
    verdicts = []
    for repetition in range(20):
        seeds = range(100 * repetition, 100 * repetition + 6)
        report = compare_runs(side(seeds[:3], seed_noise=0.02), side(seeds[3:], seed_noise=0.02))
        verdicts.append(report.verdict)
    assert verdicts.count(FAIL) == 0, f"false alarm rate {verdicts.count(FAIL)} of 20"
    assert verdicts.count(PASS) >= 5, "a report that is never decided raises no false alarm either"


def test_the_same_run_on_both_sides_is_no_failure_and_no_proof() -> None:
    report = compare_runs([make_run(1)], [make_run(1)])
    assert report.verdict is INCONCLUSIVE
    assert failing(report) == []
    assert found(report, SAMPLES).verdict is PASS
    both = compare_runs(side(A), side(A))
    assert [check.name for check in both.checks if check.verdict is not PASS] == ["a run is on one side only"]
    assert "on both sides: olmo_core-1, olmo_core-2" in found(both, "a run is on one side only").evidence
    assert found(report, ACCURACY).evidence.startswith("1 seeds a side, 3 needed.")


def test_a_real_difference_fails_with_its_name() -> None:
    report = compare_runs(side(A), side(B, reached=0.75))
    assert {ACCURACY, LAST} <= set(failing(report)) <= {ACCURACY, LAST, SPEED}
    check = found(report, ACCURACY)
    assert check.value > 0.1
    assert "90 % interval [-0.1" in check.evidence


def test_learning_slower_to_the_same_height_fails_by_the_whole_curve() -> None:
    slow = edited(side(B), **{"reward/correct_rate": 0.6})
    assert failing(compare_runs(side(A), slow)) == [SPEED]


@pytest.mark.parametrize(("seeds_a", "seeds_b"), [((1,), (11,)), ((1, 2), (11, 12)), (A, (11, 12))])
def test_too_few_seeds_never_pass(seeds_a: Sequence[int], seeds_b: Sequence[int]) -> None:
    report = compare_runs(side(seeds_a, seed_noise=1e-4), side(seeds_b, seed_noise=1e-4))
    assert report.verdict is INCONCLUSIVE
    for name in (
        ACCURACY,
        LAST,
        SPEED,
        "held-out accuracy over prompts",
        *(f"equal rates: {count}" for count in COUNTS),
    ):
        assert found(report, name).verdict is INCONCLUSIVE, name
        assert "3 needed" in found(report, name).evidence


def test_too_noisy_seeds_decide_nothing_and_the_evidence_says_what_margin_they_allow() -> None:
    report = compare_runs(side(A, seed_noise=0.1), side(B, seed_noise=0.1))
    check = found(report, ACCURACY)
    assert check.verdict is INCONCLUSIVE
    detectable = float(check.evidence.partition("a margin of ")[2].split()[0])
    assert detectable > check.tolerance


def test_one_run_a_side_however_far_apart_is_not_decided_by_its_prompts() -> None:
    check = found(compare_runs([make_run(1)], [make_run(11, reached=0.6)]), "held-out accuracy over prompts")
    assert check.verdict is INCONCLUSIVE
    assert "the same prompts paired" in check.evidence
    assert check.value > 0.2


def test_other_prompts_are_not_paired_and_fail_by_their_hash() -> None:
    other = [
        replace(
            run,
            dataset_sha256="ef" * 32,
            correct_by_prompt={f"other-{key}": value for key, value in run.correct_by_prompt.items()},
        )
        for run in side(B)
    ]
    report = compare_runs(side(A), other)
    assert failing(report) == ["same prompts"]
    assert "other prompts on each side" in found(report, "held-out accuracy over prompts").evidence


def test_another_base_model_fails() -> None:
    other = [replace(run, lineage={**LINEAGE, "model_sha256": "ff" * 32}) for run in side(B)]
    assert failing(compare_runs(side(A), other)) == ["same base model"]
    unknown = [replace(run, lineage={}) for run in side(B)]
    assert found(compare_runs(side(A), unknown), "same base model").verdict is INCONCLUSIVE


def test_settings_that_differ_fail_unless_they_are_named_or_decide_nothing() -> None:
    b = side(B, overrides=["trainer.learning_rate=0.002", "trainer.num_ranks=1"], trainer="hf_deepspeed")
    report = compare_runs(side(A), b)
    assert failing(report) == ["same settings"]
    assert "differing: trainer.learning_rate: 0.001 -> 0.002;" in found(report, "same settings").evidence
    assert compare_runs(side(A), b, differs=["trainer.learning_rate"]).verdict is PASS
    rows = {row["what"]: row for row in report.tables["settings"]}
    assert rows["trainer.backend"]["allowed"] == "yes"
    assert rows["trainer.learning_rate"]["allowed"] == "NO"


def test_free_settings_exist() -> None:
    known = {*settings(), *(key.partition(".")[0] for key in settings())}
    assert known >= FREE


def test_first_samples_of_a_common_seed() -> None:
    assert (
        found(compare_runs(side(A), side(A, trainer="hf_deepspeed")), "same samples in the first step").verdict is PASS
    )
    other = side(A, first_samples="others")
    check = found(compare_runs(side(A), other), "same samples in the first step")
    assert (check.verdict, check.value) == (FAIL, 4)
    elsewhere = side(A, first_samples="others", lineage={**LINEAGE, "machine": {"cpus": 64}})
    assert found(compare_runs(side(A), elsewhere), "same samples in the first step").verdict is INCONCLUSIVE
    assert not [c for c in compare_runs(side(A), side(B)).checks if c.name == "same samples in the first step"]


@pytest.mark.parametrize(("own", "verdict"), [("FAIL", FAIL), ("INCONCLUSIVE", INCONCLUSIVE), (None, INCONCLUSIVE)])
def test_a_run_that_is_not_sound_itself(own: str | None, verdict: ParityVerdict) -> None:
    b = [*side(B[:-1]), make_run(B[-1], own_verdict=own)]
    check = found(compare_runs(side(A), b), "each run's own report")
    assert check.verdict is verdict
    assert "B olmo_core-14" in check.evidence


def test_counts_that_differ_fail_and_rare_ones_do_not() -> None:
    report = compare_runs(side(A), side(B, tis_rate=3e-3))
    assert failing(report) == ["equal rates: tokens clipped by TIS"]
    assert "A 0 of " in found(report, "equal rates: tokens clipped by TIS").evidence
    assert failing(compare_runs(side(A), side(B, tis_rate=5e-6))) == []
    assert failing(compare_runs(side(A), side(B, truncated=0.2))) == ["equal rates: truncated responses"]


def test_counts_that_scatter_between_seeds_are_no_difference() -> None:
    """The exact test alone rejects: it takes every event for independent."""
    rates_a, rates_b = (0.0, 0.0, 0.2, 0.1), (0.0, 0.3, 0.02, 0.4)
    a = [make_run(seed, truncated=rate) for seed, rate in zip(A, rates_a, strict=True)]
    b = [make_run(seed, truncated=rate) for seed, rate in zip(B, rates_b, strict=True)]
    report = compare_runs(a, b)
    row = next(row for row in report.tables["counts"] if row["count"] == "truncated responses")
    assert row["p_value"] < 1e-10  # type: ignore[operator]
    assert failing(report) == []


# ---- time


def test_a_slower_trainer_is_reported_and_never_fails() -> None:
    slow = SPAN_SECONDS | {"forward_backward": 3 * SPAN_SECONDS["forward_backward"]}
    report = compare_runs(side(A), side(B, seconds=slow))
    assert report.verdict is PASS
    rows = spans(report)
    assert 2.7 < rows["forward_backward"]["low"] < rows["forward_backward"]["high"] < 3.3
    assert rows["optim"]["low"] < 1 < rows["optim"]["high"], "its neighbours are as they were"
    expected = (3 * 0.3 + 0.05) / (0.3 + 0.05)
    assert rows["compute = forward_backward + optim"]["b_over_a"] == pytest.approx(expected, rel=0.02)
    assert rows["step, end to end"]["b_over_a"] == pytest.approx(1.6 / 1.0, rel=0.05)
    rate: Any = report.tables["throughput"][0]
    assert rate["rate"] == "trained real tokens per second of compute"
    assert rate["b_over_a"] == pytest.approx(1 / expected, rel=0.03)


def test_waiting_is_never_charged_to_compute() -> None:
    """The reference once divided one trainer's compute plus wait by another's compute: 6.3 instead of 2.1."""
    starved = SPAN_SECONDS | {"wait_for_rollouts": 30.0}
    rows = spans(compare_runs(side(A), side(B, seconds=starved)))
    assert rows["compute = forward_backward + optim"]["b_over_a"] == pytest.approx(1, rel=0.02)
    assert rows["wait_for_rollouts"]["b_over_a"] == pytest.approx(50, rel=0.05)


def test_every_ratio_is_of_one_span_with_itself() -> None:
    rows = spans(compare_runs(side(A), side(B)))
    assert set(SPANS) < rows.keys()
    for row in rows.values():
        if row["a_median_s"]:
            assert row["b_over_a"] == pytest.approx(row["b_median_s"] / row["a_median_s"])


def test_spans_that_only_one_side_has_refuse_every_ratio() -> None:
    """A span more on one side moves seconds out of the others."""
    new_names = {"time/optim_s": "time/train_s"}
    renamed = [
        replace(run, rows=[{new_names.get(key, key): value for key, value in row.items()} for row in run.rows])
        for run in side(B)
    ]
    report = compare_runs(side(A), renamed)
    check = found(report, TIME)
    assert check.verdict is INCONCLUSIVE
    assert "optim (A only), train (B only)" in check.evidence
    assert all(row["b_over_a"] != row["b_over_a"] for table in ("time", "throughput") for row in report.tables[table])


def test_steps_that_do_not_add_up_fail_and_refuse_every_ratio() -> None:
    report = compare_runs(side(A), edited(side(B), **{"time/wait_for_rollouts_s": 0.0}))
    assert failing(report) == [TIME]
    assert f"{found(report, TIME).value:.0f}" == str(len(B) * STEPS)
    assert all(row["b_over_a"] is None for row in to_dict(report)["tables"]["time"])


def test_another_machine_makes_times_incomparable() -> None:
    report = compare_runs(side(A), side(B, lineage={**LINEAGE, "machine": {"cpus": 64}}))
    assert report.verdict is PASS
    assert "the machines differ, so times are not comparable" in found(report, TIME).evidence
    assert all(row["b_over_a"] is None for row in to_dict(report)["tables"]["time"])


def test_other_resources_are_named_beside_the_times() -> None:
    report = compare_runs(side(A), side(B, overrides=["trainer.num_ranks=1"]))
    assert "trainer.num_ranks 2 -> 1" in found(report, TIME).evidence


# ---- what is refused


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([], "side B has no run"),
        (side([1, 1]), "side B has several runs of seed 1"),
        ([make_run(1), make_run(2, overrides=["trainer.learning_rate=0.002"])], "differ in trainer.learning_rate"),
        ([make_run(1), make_run(2, trainer="hf_deepspeed")], "differ in trainer.backend"),
        ([replace(make_run(1), rows=make_run(1).rows[:7])], f"did 7 of {STEPS} steps"),
    ],
)
def test_sides_that_are_none(runs: list[FinishedRun], message: str) -> None:
    with pytest.raises(DataError, match=message):
        compare_runs(side(A), runs)


def test_a_misspelt_difference() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.lerning_rate is not a setting"):
        compare_runs(side(A), side(B), differs=["trainer.lerning_rate"])


# ---- the report


def test_the_report_is_plain_and_narrow() -> None:
    plain = to_dict(compare_runs(side(A), side(B, tis_rate=1e-3)))
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert set(plain["tables"]) == {
        "settings",
        "outcomes",
        "metrics",
        "counts",
        "time",
        "throughput",
        "curves",
        "limits",
    }
    text = render_report(plain)
    assert max(map(len, text.splitlines())) <= 120
    assert "compute = forward_backward + optim" in text
    assert "Spans have the same boundaries" in text, "limits are part of the report"


def test_curves_are_means_over_seeds_of_a_window() -> None:
    runs = edited(side(A), **{"reward/mean": 0.25})
    curves = to_dict(compare_runs(runs, side(B)))["tables"]["curves"]
    points = [row for row in curves if row["metric"] == "reward/mean" and row["side"] == "A"]
    assert [row["step"] for row in points] == list(range(1, STEPS + 1))
    assert {(row["mean"], row["low"], row["high"], row["window"]) for row in points} == {(0.25, 0.25, 0.25, 3)}
    single = to_dict(compare_runs([make_run(1)], side(B)))["tables"]["curves"]
    assert {row["low"] for row in single if row["side"] == "A"} == {None}, "one run has no band"
