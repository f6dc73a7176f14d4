"""Every rule passes on good evidence, fails when what it guards is broken, and never passes on too little."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from grpo_lib.config import ParityConfig, RunConfig, resolve
from grpo_lib.parity import verdicts
from grpo_lib.parity.probe import ENGINE_DECODE, ENGINE_SCORE, PairStatistics, compare
from grpo_lib.parity.report import LIMITS, WIDTH, build_report, render, to_dict
from grpo_lib.timing import SPANS
from grpo_lib.types import (
    CanaryResult,
    ParityCheck,
    ParityReport,
    ParityVerdict,
    ShardedTensor,
    ShardPlan,
    SyncCertificate,
)

PASS, FAIL, INCONCLUSIVE = ParityVerdict.PASS, ParityVerdict.FAIL, ParityVerdict.INCONCLUSIVE
CONFIG = ParityConfig(min_tokens=1000)
RUN = resolve("embedded_addition", ["parity.min_tokens=1000"])


def pair(name_a: str, name_b: str, differences: np.ndarray) -> PairStatistics:
    """Differences of some thousand tokens around a common value."""
    base = np.full(len(differences), -1.0)
    return compare(name_a, {"s": base + differences}, name_b, {"s": base}, cap=2.0)


def noise(scale: float, count: int = 4000) -> np.ndarray:
    return np.random.default_rng(0).uniform(-scale, scale, count)


def good_pairs() -> list[PairStatistics]:
    return [
        pair(ENGINE_SCORE, ENGINE_DECODE, np.zeros(4000)),
        pair("olmo_core", ENGINE_DECODE, noise(1e-6)),
        pair("hf", ENGINE_DECODE, noise(1e-6)),
        pair("olmo_core", ENGINE_SCORE, noise(1e-6)),
        pair("hf", "olmo_core", noise(1e-7)),
    ]


def row(step: int, **changes: Any) -> dict[str, Any]:
    """One step of a healthy run: 0.5 s, of which 5 ms are unclaimed."""
    times = {f"time/{span}_s": 0.495 / len(SPANS) for span in SPANS}
    values = {
        "step": step,
        "policy_version": step,
        "optim/applied": 1.0,
        "optim/weights_moved": 1.0,
        "loss/policy": 0.1,
    }
    counts = {"mismatch/tis_clip_count": 0.0, "batch/trained_tokens": 800.0, "optim/lr": RUN.trainer.learning_rate}
    return {**values, **counts, **times, "time/other_s": 0.005, "time/step_s": 0.5, **changes}


def good_rows() -> list[dict[str, Any]]:
    return [row(step) for step in range(1, 6)]


def certificate(version: int, *, canary: bool = False, **changes: Any) -> SyncCertificate:
    good = SyncCertificate(
        policy_version=version,
        engine_versions=(version,),
        num_tensors=36,
        num_bytes=880_000,
        transfer_s=0.05,
        missing=(),
        unexpected=(),
        unloaded=(),
        mismatched=(),
        checksum="00",
        canary=CanaryResult(num_tokens=40, max_abs=2e-6, mean_abs=1e-7, tolerance=5e-5, seconds=0.1)
        if canary
        else None,
    )
    return replace(good, **changes)


def good_certificates() -> list[SyncCertificate]:
    return [certificate(version, canary=version == 0) for version in range(6)]


RUN_ROWS = [row(step) for step in range(1, 6)]  # the five steps that `good_certificates` belong to


def evaluation(before: float | None = 0.5, after: float | None = 0.9, failed: int = 0) -> dict[str, Any]:
    def side(value: float | None) -> dict[str, Any]:
        estimate = {"value": value, "low": None, "high": None, "num_prompts": 150}
        return {"sampled_pass_at_1": estimate, "num_samples": 600, "failed_verdicts": failed}

    return {"before": side(before), "after": side(after)}


def shard_plan(*, broken: bool = False) -> ShardPlan:
    tensor = ShardedTensor(
        trainer_name="lm_head.norm.weight",
        hf_name="model.norm.weight",
        shape=(64,),
        local_numel=(32, 32),
        checksum=7,
        source_checksum=8 if broken else 7,
    )
    return ShardPlan(
        backend="olmo_core",
        num_ranks=2,
        dtype="float32",
        tensors=(tensor,),
        checkpoint="x",
        tied_embeddings=True,
        barrier_s=0.1,
    )


def report(config: RunConfig = RUN, **changes: Any) -> ParityReport:
    evidence = {
        "pairs": good_pairs(),
        "metrics": good_rows(),
        "certificates": good_certificates(),
        "evaluation": evaluation(),
        "shard_plan": shard_plan(),
    }
    return build_report(config, **(evidence | changes))


def failing(found: ParityReport) -> list[str]:
    return [check.name for check in found.checks if check.verdict is FAIL]


@pytest.mark.parametrize(
    ("value", "tolerance", "seen", "needed", "verdict"),
    [
        (1.0, 1.0, 10, 10, PASS),
        (1.0, 1.0, 9, 10, INCONCLUSIVE),
        (1.1, 1.0, 9, 10, FAIL),  # a violation needs no further evidence
        (math.nan, 1.0, 10, 10, FAIL),
        (math.nan, 1.0, 0, 1, INCONCLUSIVE),  # nothing was observed
        (math.inf, 1.0, 1, 1, FAIL),
        (0.0, 0.0, 1, 1, PASS),
        (1.0, 0.0, 0, 1, FAIL),
    ],
)
def test_decide(value: float, tolerance: float, seen: int, needed: int, verdict: ParityVerdict) -> None:
    assert verdicts.decide(value, tolerance, num_observations=seen, needed=needed) is verdict


def test_a_healthy_run_passes() -> None:
    found = report()
    assert [check for check in found.checks if check.verdict is not PASS] == []
    assert found.verdict is PASS


@pytest.mark.parametrize(
    ("differences", "broken"),
    [
        (np.r_[np.zeros(3999), 6e-5], ["max"]),
        (np.r_[np.zeros(3980), np.full(20, 2e-5)], ["p99.9"]),
        (np.full(4000, 2e-6), ["mean"]),
        (np.full(4000, -1e-3), ["mean", "p99.9", "max"]),
    ],
)
def test_each_tolerance_of_a_pair_decides_alone(differences: np.ndarray, broken: list[str]) -> None:
    checks = verdicts.pair_checks([pair("olmo_core", ENGINE_DECODE, differences)], CONFIG)
    failed = [check.name for check in checks if check.verdict is FAIL]
    assert failed == [f"olmo_core vs {ENGINE_DECODE}: {label} |dlogprob|" for label in broken]


def test_one_nan_fails_every_check_of_its_pair() -> None:
    pairs = good_pairs()
    pairs[1] = pair("olmo_core", ENGINE_DECODE, np.r_[noise(1e-6), math.nan])
    found = report(pairs=pairs)
    assert len(failing(found)) == 4
    assert "non-finite log-probabilities" in failing(found)
    assert "1 non-finite" in next(check.evidence for check in found.checks if check.verdict is FAIL)


def test_too_few_tokens_never_pass() -> None:
    few = [pair(p.name_a, p.name_b, np.zeros(999)) for p in good_pairs()]
    found = report(pairs=few, metrics=good_rows()[:1])
    assert failing(found) == []
    assert found.verdict is INCONCLUSIVE
    undecided = [check for check in found.checks if check.verdict is INCONCLUSIVE]
    assert {check.num_observations for check in undecided} == {999, 800}
    assert all("1,000 needed" in check.evidence for check in undecided)


def test_decode_must_equal_score_exactly() -> None:
    pairs = [pair(ENGINE_SCORE, ENGINE_DECODE, np.r_[np.zeros(3999), 1e-12]), *good_pairs()[1:]]
    assert failing(report(pairs=pairs)) == [f"{ENGINE_DECODE} vs {ENGINE_SCORE}: max |dlogprob|"]
    without = [p for p in good_pairs() if p.name_a != ENGINE_SCORE and p.name_b != ENGINE_SCORE]
    assert report(pairs=without).verdict is INCONCLUSIVE
    assert report(pairs=[]).verdict is INCONCLUSIVE


def test_clipped_weights_of_probe_and_run() -> None:
    pairs = good_pairs()
    pairs[2] = pair("hf", ENGINE_DECODE, np.r_[np.zeros(3999), 0.7])
    assert "tis_clipfrac, hf on stored tokens" in failing(report(pairs=pairs))
    rows = [*good_rows(), row(6, **{"mismatch/tis_clip_count": 2.0})]
    (name,) = failing(report(metrics=rows, certificates=[*good_certificates(), certificate(6)]))
    assert name == "tis_clipfrac, training steps"
    check = next(c for c in report().checks if c.name == name)
    assert check.evidence.startswith("0 of 4,000 tokens; rate in [0, 0.00092]")


@pytest.mark.parametrize(
    ("changes", "mention"),
    [
        ({"missing": ("model.norm.weight",)}, "not ok: v3"),
        ({"engine_versions": (2,)}, "not ok: v3"),
        ({"mismatched": ("lm_head.weight",)}, "not ok: v3"),
        ({"policy_version": 4, "engine_versions": (4,)}, "without a push: v3"),
    ],
)
def test_one_bad_push_fails(changes: dict[str, Any], mention: str) -> None:
    certificates = good_certificates()
    certificates[3] = replace(certificates[3], **changes)
    check = verdicts.sync_check(certificates, RUN_ROWS)
    assert check.verdict is FAIL
    assert mention in check.evidence


@pytest.mark.parametrize(("kept", "mention"), [(slice(1, None), "v0"), (slice(None, -1), "v5")])
def test_a_push_missing_at_either_end_fails(kept: slice, mention: str) -> None:
    """The rows say which versions there were: neither the first sync nor the last may be left out unseen."""
    check = verdicts.sync_check(good_certificates()[kept], RUN_ROWS)
    assert check.verdict is FAIL
    assert f"versions without a push: {mention}" in check.evidence


def test_no_push_at_all_fails() -> None:
    assert verdicts.sync_check([], RUN_ROWS).verdict is FAIL


def test_a_failed_canary_and_a_missing_one() -> None:
    bad = replace(good_certificates()[0], canary=CanaryResult(
        num_tokens=40, max_abs=1e-3, mean_abs=1e-4, tolerance=5e-5, seconds=0.1
    ))  # fmt: skip
    assert verdicts.sync_check([bad, *good_certificates()[1:]], RUN_ROWS).verdict is FAIL
    unproven = verdicts.sync_check([certificate(version) for version in range(6)], RUN_ROWS)
    assert unproven.verdict is INCONCLUSIVE
    assert verdicts.sync_check([], []).verdict is INCONCLUSIVE
    # Without a canary a broken push still fails.
    assert verdicts.sync_check([certificate(0, missing=("x",))], []).verdict is FAIL


@pytest.mark.parametrize(
    ("rows", "mention"),
    [
        ([row(1), row(2, **{"optim/weights_moved": 0.0})], "step 2 moved no weight"),
        ([row(1), row(2, policy_version=1)], "step 2 went from version 1 to 1"),
        ([row(1), row(2, policy_version=3)], "step 2 went from version 1 to 3"),
        ([row(1), row(2, **{"optim/applied": 0.0})], "step 2 went from version 1 to 2"),
    ],
)
def test_learning_means_one_step_that_moves_weights(rows: Sequence[dict[str, Any]], mention: str) -> None:
    check = verdicts.learning_check(rows)
    assert check.verdict is FAIL
    assert mention in check.evidence


def test_a_step_that_was_not_applied_must_leave_the_version_alone() -> None:
    idle = row(2, policy_version=1, **{"optim/applied": 0.0, "optim/weights_moved": None, "loss/policy": None})
    check = verdicts.learning_check([row(1), idle, row(3, policy_version=2)])
    assert check.verdict is PASS
    assert check.num_observations == 2
    assert verdicts.finite_check([row(1), idle]).verdict is PASS
    assert verdicts.learning_check([idle]).verdict is INCONCLUSIVE


def rated(*rates: float) -> list[dict[str, Any]]:
    return [row(step, **{"optim/lr": rate}) for step, rate in enumerate(rates, start=1)]


@pytest.mark.parametrize(
    ("scheduler", "warmup", "rates", "verdict"),
    [
        ("constant", 0, [1.0, 1.0, 1.0, 1.0], PASS),
        ("constant", 0, [1.0, 0.75, 0.5, 0.25], FAIL),  # fell through to a linear decay
        ("constant", 2, [0.5, 1.0, 1.0, 1.0], PASS),
        ("constant", 2, [1.0, 1.0, 1.0, 1.0], FAIL),  # no warm-up
        ("constant", 0, [2.0, 2.0, 2.0, 2.0], FAIL),
        ("linear", 1, [1.0, 1.0, 0.6, 0.3], PASS),
        ("cosine", 0, [1.0, 0.9, 0.5, 0.1], PASS),
        ("cosine", 0, [1.0, 0.5, 0.6, 0.1], FAIL),
        ("linear", 0, [1.0, 0.5, 0.0, 0.0], FAIL),  # the last steps would not learn
    ],
)
def test_learning_rate_follows_its_name(
    scheduler: str, warmup: int, rates: list[float], verdict: ParityVerdict
) -> None:
    config = RUN.trainer.model_copy(update={"learning_rate": 1.0, "lr_scheduler": scheduler, "warmup_steps": warmup})
    assert verdicts.schedule_check(rated(*rates), config).verdict is verdict
    idle = row(9, policy_version=len(rates), **{"optim/applied": 0.0, "optim/lr": None})
    assert verdicts.schedule_check([*rated(*rates), idle], config).verdict is verdict


def test_time_that_nobody_claims() -> None:
    assert verdicts.time_check(good_rows()).value == pytest.approx(0.01)
    slow = row(6, **{"time/other_s": 0.205, "time/step_s": 0.7})
    check = verdicts.time_check([*good_rows(), slow])
    assert check.verdict is FAIL
    assert check.value == pytest.approx((5 * 0.005 + 0.205) / (5 * 0.5 + 0.7))
    assert "step 6" in check.evidence
    twice = row(6, **{f"time/{SPANS[0]}_s": 0.495})  # a span counted twice claims more than there is
    assert verdicts.time_check([twice]).verdict is FAIL
    assert verdicts.time_check([]).verdict is INCONCLUSIVE


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_a_metric_without_a_value_in_an_applied_step(value: float | None) -> None:
    check = verdicts.finite_check([row(1), row(2, **{"loss/policy": value})])
    assert check.verdict is FAIL
    assert "loss/policy in step 2" in check.evidence


def test_an_evaluation_of_exactly_zero_fails_loudly() -> None:
    assert failing(report(evaluation=evaluation(after=0.0))) == ["evaluation above zero"]
    assert verdicts.evaluation_check(evaluation(before=0.0, after=0.01)).verdict is PASS
    assert verdicts.evaluation_check(evaluation(after=None, failed=600)).verdict is INCONCLUSIVE


def test_a_sharded_checkpoint_that_differs() -> None:
    found = report(shard_plan=shard_plan(broken=True))
    assert failing(found) == ["sharded checkpoint"]
    assert "model.norm.weight" in next(c.evidence for c in found.checks if c.name == "sharded checkpoint")
    assert "sharded checkpoint" not in [check.name for check in report(shard_plan=None).checks]


# ---- the report


def test_plain_dict_is_strict_json() -> None:
    pairs = [*good_pairs(), pair("nan", ENGINE_DECODE, np.full(4000, math.nan))]
    plain = to_dict(report(pairs=pairs))
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["verdict"] == "FAIL"
    assert type(plain["verdict"]) is str
    assert {"name", "verdict", "value", "tolerance", "num_observations", "evidence"} == set(plain["checks"][0])
    assert [p["name_a"] for p in plain["tables"]["pairs"]][-1] == "nan"


def test_tables() -> None:
    tables = to_dict(report())["tables"]
    per_pair = {p["name_a"] + " vs " + p["name_b"]: 0 for p in tables["pairs"]}
    for bin_ in tables["histogram"]:
        per_pair[bin_["pair"]] += bin_["tokens"]
    assert set(per_pair.values()) == {4000}
    assert sum(span["share"] for span in tables["time"]) == pytest.approx(1.0)
    assert next(s for s in tables["time"] if s["span"] == "other")["seconds_per_step"] == pytest.approx(0.005)
    assert {limit["metric"] for limit in tables["limits"]} == set(LIMITS)
    assert to_dict(report(metrics=[]))["tables"]["time"] == []


def test_terminal_text_is_aligned_and_narrow() -> None:
    pairs = [*good_pairs(), pair("x" * 90, ENGINE_DECODE, np.full(4000, 1e-2))]
    text = render(to_dict(report(pairs=pairs)))
    lines = text.splitlines()
    assert max(map(len, lines)) <= WIDTH
    table = [line for line in lines if line.startswith(("PASS  ", "FAIL  ", "INCONCLUSIVE  "))]
    assert len(table) == len(report(pairs=pairs).checks)
    assert len({len(line) for line in table}) == 1
    assert lines[-1] == f"FAIL: {len(table) - 3} PASS, 3 FAIL, 0 INCONCLUSIVE"
    assert "largest at s response token" in text


def test_render_shows_what_was_not_finite() -> None:
    check = ParityCheck(
        name="x", verdict=FAIL, value=math.nan, tolerance=1e-6, num_observations=3, evidence="word " * 60
    )
    text = render(to_dict(ParityReport(checks=(check,))))
    assert "not finite" in text
    assert max(map(len, text.splitlines())) <= WIDTH
