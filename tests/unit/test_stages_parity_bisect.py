"""A replay that FAILs carries its causes; any other report stays as it is."""

from __future__ import annotations

from typing import Any, cast

from grpo_lib.errors import DataError
from grpo_lib.parity.bisect import DIAGNOSIS
from grpo_lib.stages.parity_bisect import causes_of, with_causes
from grpo_lib.stages.stored_run import StoredRun

RUN = cast("StoredRun", object())
TRAINERS = ("olmo_core", "hf_deepspeed")
FINDING = {"cause": "labels shifted", "subject": "hf_deepspeed", "where": "step 1", "evidence": "e", "unexplained": 0.0}


def report(verdict: str) -> dict[str, Any]:
    return {"verdict": verdict, "checks": [{"name": "lockstep"}], "tables": {"lockstep": [{"step": 1}]}}


def bisected(findings: list[dict[str, Any]], calls: list[tuple[str, str]]):
    def bisect(run: object, *, a: str, b: str) -> dict[str, Any]:
        assert run is RUN
        calls.append((a, b))
        return {"tables": {DIAGNOSIS: findings, "judged_steps": [{"step": 1, "name": a}, {"step": 1, "name": b}]}}

    return bisect


def explained(given: dict[str, Any], run: StoredRun, *, trainers: tuple[str, ...], bisect: Any) -> dict[str, Any]:
    return with_causes(given, causes_of(given, run, trainers=trainers, bisect=bisect))


def test_only_a_fail_is_bisected() -> None:
    calls: list[tuple[str, str]] = []
    for verdict in ("PASS", "INCONCLUSIVE"):
        assert explained(report(verdict), RUN, trainers=TRAINERS, bisect=bisected([FINDING], calls)) == report(verdict)
    assert calls == []


def test_a_fail_carries_causes_and_their_tables() -> None:
    calls: list[tuple[str, str]] = []
    given = report("FAIL")
    found = explained(given, RUN, trainers=TRAINERS, bisect=bisected([FINDING], calls))
    assert calls == [("hf_deepspeed", "olmo_core")], "the follower beside the leader"
    assert found["checks"] == given["checks"]
    assert found["tables"]["lockstep"] == [{"step": 1}]
    assert found["tables"][DIAGNOSIS] == [FINDING]
    assert len(found["tables"]["judged_steps"]) == 2
    assert given == report("FAIL"), "the report that was given is not changed"


def test_nothing_found_is_said() -> None:
    found = explained(report("FAIL"), RUN, trainers=TRAINERS, bisect=bisected([], []))
    (row,) = found["tables"][DIAGNOSIS]
    assert row["cause"] == "unexplained"
    assert row["subject"] == "hf_deepspeed vs olmo_core"
    assert row["where"] == "2 judged steps"


def test_a_bisect_that_cannot_be_made_leaves_the_verdict() -> None:
    def broken(run: object, *, a: str, b: str) -> dict[str, Any]:
        raise DataError("the rollouts of step 2 are gone")

    found = explained(report("FAIL"), RUN, trainers=TRAINERS, bisect=broken)
    assert found["verdict"] == "FAIL"
    (row,) = found["tables"][DIAGNOSIS]
    assert (row["where"], row["evidence"]) == ("not bisected", "the rollouts of step 2 are gone")
