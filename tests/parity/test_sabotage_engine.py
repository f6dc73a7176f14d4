"""The engine's mistakes on a real vLLM engine, started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from grpo_lib.types import ParityVerdict
from tests.parity.engine_lab import ENGINE_CASES, EngineCase, EngineLab, engine_lab, healthy


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineLab]:
    with engine_lab(tmp_path_factory.mktemp("engine")) as started:
        yield started


def test_a_healthy_push_and_its_samples_have_no_finding(lab: EngineLab) -> None:
    outcome = healthy(lab)
    assert not [check for check in outcome.report.checks if check.verdict is ParityVerdict.FAIL]
    assert outcome.diagnosis.findings == ()
    assert outcome.report.checks[0].num_observations > 300


@pytest.mark.parametrize("case", ENGINE_CASES, ids=lambda case: case.key)
def test_a_mistake_of_the_engine_fails_is_named_and_located(lab: EngineLab, case: EngineCase) -> None:
    outcome = case.run(lab)
    assert outcome.report.verdict is ParityVerdict.FAIL
    (finding,) = outcome.diagnosis.findings
    assert (finding.cause, finding.subject) == (case.cause, case.subject), finding
    for text in case.points_at:
        assert text in finding.where, finding
