"""What a finished report does to the flow, and what it prints."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_lib.errors import ParityFailure
from grpo_lib.parity.report import gate, summary, to_dict
from grpo_lib.types import ParityCheck, ParityReport, ParityVerdict


def parity(*verdicts: ParityVerdict) -> dict[str, Any]:
    checks = tuple(
        ParityCheck(
            name=f"check {index}",
            verdict=verdict,
            value=0.25,
            tolerance=0.1,
            num_observations=7,
            evidence=f"evidence {index}",
        )
        for index, verdict in enumerate(verdicts)
    )
    return to_dict(ParityReport(checks=checks))


def test_a_failed_check_fails_the_flow_by_name() -> None:
    report = parity(ParityVerdict.PASS, ParityVerdict.FAIL, ParityVerdict.INCONCLUSIVE)
    with pytest.raises(ParityFailure, match=r"^1 of 3 parity checks failed: check 1$"):
        gate(report)


@pytest.mark.parametrize("verdict", [ParityVerdict.PASS, ParityVerdict.INCONCLUSIVE])
def test_nothing_else_does(verdict: ParityVerdict) -> None:
    report = parity(ParityVerdict.PASS, verdict)
    gate(report)
    assert report["verdict"] == verdict


def test_the_summary_holds_verdicts_evidence_and_accuracies() -> None:
    estimate = {"value": 0.5, "low": None, "high": 0.75, "num_prompts": 1}
    side = {"sampled_pass_at_1": estimate, "greedy_pass_at_1": estimate | {"value": None}}
    text = summary(parity(ParityVerdict.PASS, ParityVerdict.FAIL), {"before": side, "after": side, "gain": side})
    assert "FAIL: 1 PASS, 1 FAIL, 0 INCONCLUSIVE" in text
    assert "evidence 1" in text
    assert "evidence 0" not in text, "what passed needs no explanation"
    assert "0.500 -> 0.500   gain 0.500 [unknown, 0.750]" in text
    assert "unknown -> unknown" in text
