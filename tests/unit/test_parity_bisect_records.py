"""Findings from certificates, seeds and layers; how findings merge and reach the reader."""

from dataclasses import replace

import pytest
import torch

from grpo_lib.errors import ParityFailure
from grpo_lib.parity.bisect import Cause, Diagnosis, Finding, with_diagnosis
from grpo_lib.parity.bisect_layers import layer_differences, layer_rows, parting
from grpo_lib.parity.bisect_records import bisect_certificates, bisect_inputs
from grpo_lib.parity.replay_inputs import InputAudit
from grpo_lib.parity.report import gate, render, to_dict
from grpo_lib.types import CanaryResult, ParityCheck, ParityReport, ParityVerdict, SyncCertificate
from tests.unit.bisect_parts import batches_of, scripted_plan

CANARY = CanaryResult(num_tokens=8, max_abs=1e-6, mean_abs=1e-7, tolerance=5e-5, seconds=0.1)
CERTIFICATE = SyncCertificate(
    policy_version=4,
    engine_versions=(4, 4),
    num_tensors=20,
    num_bytes=100,
    transfer_s=0.1,
    missing=(),
    unexpected=(),
    unloaded=(),
    mismatched=(),
    checksum="c",
    canary=CANARY,
)


def finding(cause: Cause = Cause.TEMPERATURE, subject: str = "olmo_core") -> Finding:
    return Finding(cause=cause, subject=subject, where="document 3", evidence="equals a plain forward")


def test_a_certificate_that_is_ok_has_no_finding() -> None:
    assert bisect_certificates([CERTIFICATE], pushed=[4]).findings == ()


@pytest.mark.parametrize(
    ("change", "cause", "where"),
    [
        ({"missing": ("model.norm.weight",)}, Cause.TENSORS_NOT_SENT, "root-level tensors model.norm.weight"),
        ({"unloaded": ("model.layers.0.w",)}, Cause.TENSORS_NOT_SENT, "block tensors model.layers.0.w"),
        (
            {"mismatched": ("lm_head.weight", "model.layers.1.w")},
            Cause.TENSORS_DAMAGED,
            "tensors lm_head.weight, model",
        ),
        ({"unexpected": ("x",)}, Cause.TENSORS_DAMAGED, "root-level tensors x, push of version 4"),
        ({"engine_versions": (4, 3)}, Cause.ENGINE_BEHIND, "push of version 4"),
        ({"canary": replace(CANARY, max_abs=0.1)}, Cause.DECODE_DIFFERS, "push of version 4"),
    ],
)
def test_what_is_wrong_with_a_push_is_named(change: dict[str, object], cause: Cause, where: str) -> None:
    (found,) = bisect_certificates([CERTIFICATE, replace(CERTIFICATE, **change)]).findings  # pyright: ignore
    assert found.cause is cause
    assert where in found.where


def test_a_version_without_a_push_is_named() -> None:
    (found,) = bisect_certificates([CERTIFICATE], pushed=[3, 4]).findings
    assert (found.cause, found.where) == (Cause.ENGINE_BEHIND, "version 3")


def test_samples_with_foreign_seeds_and_changed_advantages_are_named() -> None:
    audit = InputAudit(
        step=1, num_groups=2, num_samples=8, wrong_advantages=("e0.p1",), wrong_versions=(), wrong_seeds=("e0.p0/3",)
    )
    foreign, changed = bisect_inputs([audit]).findings
    assert (foreign.cause, foreign.where) == (Cause.FOREIGN_ROLLOUTS, "e0.p0/3")
    assert "1 of 8 samples" in foreign.evidence
    assert (changed.cause, changed.where) == (Cause.ADVANTAGES_CHANGED, "groups e0.p1")


def test_layers_part_at_the_first_token_over_tolerance() -> None:
    batches = batches_of(scripted_plan())
    generator = torch.Generator().manual_seed(0)
    right = [
        {name: torch.randn(*b.doc_ids.shape, 8, generator=generator) for name in ("embedding", "layer 0", "layer 1")}
        for b in batches
    ]
    own = [{name: tensor.clone() for name, tensor in layers.items()} for layers in right]
    second = int((batches[0].doc_ids[1] == 1).sum())  # start of the second document of row 1
    own[0]["layer 0"][1, second + 2] *= 1.5
    own[0]["layer 1"] += 1
    own[0]["embedding"][batches[0].doc_ids == 0] = 7  # padding counts for nothing
    differences = layer_differences(batches, own, right, tolerance=1e-4)
    assert [row["relative"] == 0 for row in layer_rows("a", differences)] == [True, False, False]
    assert differences[1].relative == pytest.approx(0.5)
    assert parting(differences).startswith(
        "hidden states part at layer 0 (0.5 relative), first at token 2 of document 2"
    )
    assert "of row 1" in parting(differences)
    assert "agree in every layer" in parting(differences[:1])
    with pytest.raises(ValueError, match="micro-batch 0 has the layers"):
        layer_differences(batches, [{"embedding": right[0]["embedding"]}] * len(right), right, tolerance=1.0)


def test_what_is_explained_elsewhere_is_not_unexplained_too() -> None:
    unexplained = finding(Cause.UNEXPLAINED)
    other = finding(Cause.UNEXPLAINED, "hf_deepspeed")
    merged = Diagnosis.merged(
        [
            Diagnosis(findings=(unexplained,), tables={"layers": [{"a": 1}]}),
            Diagnosis(findings=(finding(), other), tables={"layers": [{"a": 2}]}),
        ]
    )
    assert merged.findings == (finding(), other)
    assert merged.tables == {"layers": [{"a": 1}, {"a": 2}]}


def test_a_failing_report_names_the_cause() -> None:
    check = ParityCheck(
        name="max", verdict=ParityVerdict.FAIL, value=1.0, tolerance=0.1, num_observations=9, evidence="far"
    )
    plain = to_dict(with_diagnosis(ParityReport(checks=(check,)), Diagnosis(findings=(finding(),))))
    assert "cause        olmo_core: temperature not applied. Where: document 3. Why: equals" in render(plain)
    assert plain["tables"]["diagnosis"][0]["unexplained"] is None
    with pytest.raises(ParityFailure, match="Cause, by bisect: olmo_core: temperature not applied"):
        gate(plain)
