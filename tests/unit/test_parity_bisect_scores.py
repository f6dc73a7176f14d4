"""Scores bisected against a scripted reference: each known mistake is named, the unknown and the mixed are not."""

from collections.abc import Mapping

import numpy as np
import pytest

from grpo_lib.algo.faults import Fault, Sight
from grpo_lib.parity.bisect import Cause, Diagnosis, Finding
from grpo_lib.parity.bisect_scores import bisect_scores, predict, rms_and_max
from grpo_lib.parity.probe import ENGINE_DECODE
from tests.unit.bisect_parts import NAMES, ScriptedReference, batches_of, scripted_plan

REFERENCE = ScriptedReference()
BATCHES = batches_of(scripted_plan())
RIGHT = predict(REFERENCE, BATCHES, Fault())
Scores = Mapping[str, np.ndarray]


def noisy(scores: Scores, size: float = 1e-6) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {key: values + size * rng.normal(size=len(values)) for key, values in scores.items()}


def bisected(scores: Scores, name: str = "trainer", reference: ScriptedReference = REFERENCE) -> Diagnosis:
    return bisect_scores({"right": noisy(RIGHT), name: scores}, BATCHES, reference, tolerance=1e-4)


def only(diagnosis: Diagnosis) -> Finding:
    (finding,) = diagnosis.findings
    return finding


@pytest.mark.parametrize(
    ("fault", "cause", "where"),
    [
        (Fault(sight=Sight.ROW), Cause.BOUNDARIES_DROPPED, "document 2 of row 0 of micro-batch 0"),
        (Fault(sight=Sight.MICRO_BATCH), Cause.BOUNDARIES_DROPPED, "document 2 of row 0 of micro-batch 0"),
        (Fault(sight=Sight.ROW, positions_restart=False), Cause.POSITIONS_RUN_ON, "document 2 of row 0"),
        (Fault(label_shift=1), Cause.LABELS_SHIFTED, "document 1 of row 0"),
        (Fault(label_shift=-1), Cause.LABELS_SHIFTED, "document 1 of row 0"),
        (Fault(temperature=1.0), Cause.TEMPERATURE, "temperature 0.7 not applied"),
        (Fault(temperature=0.49), Cause.TEMPERATURE, "temperature 0.7 applied twice"),
        (Fault(version=2), Cause.STALE_WEIGHTS, "version 2 instead of 3"),
        (Fault(version=0), Cause.STALE_WEIGHTS, "version 0 instead of 3"),
        (Fault(version=2, tensors=(NAMES[0], NAMES[2])), Cause.STALE_TENSORS, f"{NAMES[0]}, {NAMES[2]} of version 2"),
        (Fault(version=2, tensors=(NAMES[2],)), Cause.STALE_TENSORS, f"root-level tensor {NAMES[2]} of version 2"),
        (Fault(version=0, tensors=(NAMES[1],)), Cause.STALE_TENSORS, f"tensor {NAMES[1]} of version 0"),
        (Fault(bf16_weights=True), Cause.ROUNDED_WEIGHTS, "document 1 of row 0"),
    ],
)
def test_each_known_mistake_is_named(fault: Fault, cause: Cause, where: str) -> None:
    finding = only(bisected(noisy(predict(REFERENCE, BATCHES, fault))))
    assert finding.cause is cause, finding
    assert where in finding.where
    assert 0 < finding.unexplained < 0.01


def test_a_head_that_stayed_behind_is_named_where_heads_are_tied() -> None:
    scores = noisy(predict(REFERENCE, BATCHES, Fault(head_version=2)))
    tied = ScriptedReference(tied_embedding=NAMES[0])
    assert only(bisected(scores, reference=tied)).cause is Cause.HEAD_UNTIED
    assert only(bisected(scores)).cause is Cause.UNEXPLAINED


def test_values_read_one_token_late_are_a_shift() -> None:
    finding = only(bisected({key: np.roll(values, -1) for key, values in RIGHT.items()}))
    assert finding.cause is Cause.LABELS_SHIFTED
    assert "values are shifted" in finding.evidence


def test_within_tolerance_is_no_finding() -> None:
    assert bisected(noisy(RIGHT)).findings == ()


def test_nothing_known_is_unexplained_with_its_place() -> None:
    scores = {key: values + (0.2 if key == "e0.p1/2" else 0) for key, values in RIGHT.items()}
    finding = only(bisected(scores))
    assert finding.cause is Cause.UNEXPLAINED
    assert "e0.p1/2" in finding.where
    assert "1 of 12 documents differ: e0.p1/2" in finding.evidence


def test_two_mistakes_at_once_are_unexplained() -> None:
    assert only(bisected(predict(REFERENCE, BATCHES, Fault(label_shift=1, version=2)))).cause is Cause.UNEXPLAINED


def test_two_explanations_are_none() -> None:
    class SameVersions(ScriptedReference):
        def logprobs(self, batch, fault):
            return super().logprobs(batch, Fault(version=2) if fault == Fault(version=0) else fault)

    finding = only(bisected(noisy(predict(REFERENCE, BATCHES, Fault(version=2))), reference=SameVersions()))
    assert finding.cause is Cause.UNEXPLAINED
    assert "several mistakes explain it equally well" in finding.evidence


def test_a_mistake_of_some_documents_is_named_with_them() -> None:
    """One of several engines has stale weights."""
    stale = predict(REFERENCE, BATCHES, Fault(version=2))
    some = {"e0.p0/1", "e0.p2/3"}
    finding = only(bisected({k: stale[k] if k in some else v for k, v in noisy(RIGHT).items()}, ENGINE_DECODE))
    assert finding.cause is Cause.STALE_WEIGHTS
    assert "in 2 of 12 documents" in finding.evidence
    assert "e0.p0/1, e0.p2/3" in finding.evidence


def test_few_stored_documents_that_no_weights_explain_are_foreign() -> None:
    rng = np.random.default_rng(2)
    scores = {k: v + rng.normal(size=len(v)) if k == "e0.p1/0" else v for k, v in noisy(RIGHT).items()}
    finding = only(bisected(scores, ENGINE_DECODE))
    assert (finding.cause, finding.where) == (Cause.FOREIGN_ROLLOUTS, "e0.p1/0")
    assert only(bisected(scores)).cause is Cause.UNEXPLAINED, "a trainer stores nothing that another could have drawn"


def test_nan_is_located_and_explained_by_nothing() -> None:
    scores = noisy(RIGHT)
    scores["e0.p1/3"][2] = np.nan
    finding = only(bisected(scores))
    assert finding.cause is Cause.UNEXPLAINED
    assert "e0.p1/3" in finding.where
    assert "response token 2" in finding.where


def test_the_table_of_differences_has_the_values() -> None:
    scores = {key: values + (0.2 if key == "e0.p1/2" else 0) for key, values in RIGHT.items()}
    (row,) = bisected(scores).tables["differences"]
    assert row["document"] == "e0.p1/2"
    worst = row["worst_response_token"]
    assert isinstance(worst, int)
    assert row["reference"] == pytest.approx(RIGHT["e0.p1/2"][worst])
    assert row["value"] == pytest.approx(RIGHT["e0.p1/2"][worst] + 0.2)


def test_edges_are_left_out_where_they_are_open() -> None:
    a, b = {"x": np.array([9.0, 1.0, 9.0])}, {"x": np.zeros(3)}
    assert rms_and_max(a, b, ["x"], edges=False) == (1.0, 1.0)
    assert rms_and_max(a, b, ["x"])[1] == 9.0
