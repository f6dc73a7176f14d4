"""Every mistake of the table FAILs its report, is named by its cause, and bisect points at where it is.

And what must not happen: a FAIL without a mistake, and a cause that is only guessed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from grpo_lib.config import with_overrides
from grpo_lib.errors import ParityFailure
from grpo_lib.parity.bisect import Cause, Diagnosis, Finding
from grpo_lib.parity.bisect_replay import ReplaySide, StoredScores, bisect_replay
from grpo_lib.parity.bisect_verdicts import bisect_report
from grpo_lib.parity.probe import StoredLogprobs
from grpo_lib.parity.replay_inputs import ReplayBatch
from grpo_lib.parity.report import gate, render, to_dict
from grpo_lib.stages.replay_files import StateFile
from grpo_lib.trainers.measured_adamw import local_tensor
from grpo_lib.types import PackedBatch, ParityVerdict
from tests.parity import saboteurs
from tests.parity.cases import CASES, Case, replaced_rollouts
from tests.parity.lab import BACKENDS, Lab, Outcome
from tests.parity.stored_steps import Sampler, draw_step

REPETITIONS = 40


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_a_mistake_fails_is_named_and_located(lab: Lab, case: Case) -> None:
    outcome = case.run(lab)
    assert outcome.report.verdict is ParityVerdict.FAIL
    (finding,) = outcome.diagnosis.findings
    assert (finding.cause, finding.subject) == (case.cause, case.subject), finding
    for text in case.points_at:
        assert text in finding.where, finding
    check_text_names(outcome, finding)


def check_text_names(outcome: Outcome, finding: Finding) -> None:
    """What a user reads: the table of the terminal, and the error of the gate."""
    plain = to_dict(outcome.report)
    assert str(finding.cause) in " ".join(render(plain).split())
    with pytest.raises(ParityFailure, match=str(finding.cause)):
        gate(plain)


def replayed(lab: Lab, backend: str, sabotage: Any) -> Outcome:
    leader = next(name for name in BACKENDS if name != backend)
    return lab.replay(lab.healthy(leader), lambda: lab.suspect(sabotage(lab.backend(backend))))


# -- never a guess -----------------------------------------------------------------------------------------------------


def louder_block(backend: Any) -> Any:
    """One block adds 1 % more to the residual stream than it should: no mistake that bisect knows."""
    block = backend._model.blocks["1"]
    forward = block.forward
    block.forward = lambda x, **options: x + 1.01 * (forward(x, **options) - x)
    return backend


def test_an_unknown_mistake_is_located_and_not_named(lab: Lab) -> None:
    outcome = replayed(lab, "olmo_core", louder_block)
    assert outcome.report.verdict is ParityVerdict.FAIL
    (finding,) = outcome.diagnosis.findings
    assert (finding.cause, finding.subject) == (Cause.UNEXPLAINED, "suspect")
    assert "hidden states part at layer 1" in finding.where
    assert "no" not in finding.evidence.split("leaves")[0].split(";")[-1].split()
    rows = {row["layer"]: row for row in outcome.diagnosis.tables["layers"]}
    assert list(rows) == ["embedding", "layer 0", "layer 1"]
    assert rows["embedding"]["relative"] == 0
    assert rows["layer 0"]["parts_at"] == ""


def test_two_mistakes_at_once_are_not_taken_for_one(lab: Lab) -> None:
    def both(backend: Any) -> Any:
        return saboteurs.ChangedBatches(saboteurs.drop_boundaries(backend), saboteurs.labels_one_later)

    outcome = replayed(lab, "hf_deepspeed", both)
    assert outcome.report.verdict is ParityVerdict.FAIL
    assert outcome.diagnosis.causes == {Cause.UNEXPLAINED}


def test_noise_in_a_gradient_is_not_taken_for_other_advantages(lab: Lab) -> None:
    class Noisy(saboteurs.Wrapped):
        def forward_backward(self, micro_batches: Any, loss: Any, *, loss_denominator: float) -> Any:
            metrics = self._backend.forward_backward(micro_batches, loss, loss_denominator=loss_denominator)
            generator = torch.Generator().manual_seed(3)
            for parameter in self._backend._model.parameters():
                shard = local_tensor(parameter.grad)
                shard.add_(1e-3 * torch.randn(shard.shape, generator=generator))
            return metrics

    outcome = replayed(lab, "olmo_core", Noisy)
    assert outcome.report.verdict is ParityVerdict.FAIL
    (finding,) = outcome.diagnosis.findings
    assert finding.cause is Cause.UNEXPLAINED
    assert "24 of 24 tensors" in finding.evidence


# -- positions ---------------------------------------------------------------------------------------------------------


def test_positions_that_run_on_change_nothing_where_the_mask_is_right(lab: Lab) -> None:
    """Rotary attention sees differences of positions only, and inside a document those are the same.

    Larger angles round otherwise, and no more; so one pack is a micro-batch here, and positions run on to 64.
    """
    outcome = lab.replay(
        lab.healthy("hf_deepspeed"),
        lambda: lab.suspect(saboteurs.run_positions_on(lab.backend("olmo_core"))),
        config=with_overrides(lab.config, ["trainer.micro_batch_packs=1"]),
    )
    assert outcome.report.verdict is ParityVerdict.PASS
    assert outcome.diagnosis.findings == ()
    apart = [row["max |dlogprob|"] for row in outcome.report.tables["lockstep"]]
    assert all(isinstance(value, float) and 0 < value < lab.config.parity.replay_max_abs for value in apart)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_whose_positions_run_on_is_refused(lab: Lab, backend: str) -> None:
    """Where position ids define the documents the form of the batch is checked, so that it cannot come to that."""

    def run_on(batch: PackedBatch) -> PackedBatch:
        positions = torch.arange(batch.position_ids.shape[1]).expand_as(batch.position_ids)
        return replace(batch, position_ids=positions.contiguous())

    (batch, *_) = lab.scoring_batches(lab.steps.batches[0].groups)
    with pytest.raises(ValueError, match="position_ids do not restart at 0"):
        lab.healthy(backend).backend.logprobs(run_on(batch))


# -- no false alarm ----------------------------------------------------------------------------------------------------


def test_identical_set_ups_under_other_seeds_do_not_fail(lab: Lab) -> None:
    """Probe and lockstep replay of rollouts that only a seed tells apart, forty times.

    0 false alarms of 40 leave rates up to 1 - 0.05^(1/40) = 7.2 % possible at 95 %.
    """
    sampler = Sampler(lab.model)
    sampler.load(lab.steps.weights(0))
    leader, follower = (lab.healthy(name) for name in BACKENDS)
    verdicts = []
    padding_token_trained = 0
    for seed in range(100, 100 + REPETITIONS):
        config = with_overrides(lab.config, [f"seed={seed}", "parity.replay_steps=1"])
        batch = draw_step(sampler, config, 1, version=0)
        padding_token_trained += sum(0 in r.completion.token_ids[:-1] for g in batch.groups for r in g.rollouts)
        probed = lab.probe_report(batch.groups, lab.scorers(batch.groups, version=0), version=0)
        replayed = lab.replay_report(leader, follower, config=config, steps=[batch])
        verdicts.append((probed.verdict, replayed.verdict))
    assert padding_token_trained > REPETITIONS, "a policy samples every token, that of padding too"
    assert verdicts == [(ParityVerdict.PASS, ParityVerdict.PASS)] * REPETITIONS


def test_bisect_finds_nothing_where_nothing_is_wrong(lab: Lab) -> None:
    outcome = lab.replay(lab.healthy("olmo_core"), lambda: lab.healthy("hf_deepspeed"))
    assert (outcome.report.verdict, outcome.diagnosis.findings) == (ParityVerdict.PASS, ())
    for version, batch in enumerate(lab.steps.batches):
        outcome = lab.probe(batch.groups, version=version)
        assert (outcome.report.verdict, outcome.diagnosis.findings) == (ParityVerdict.PASS, ())


# -- what the engine stored, in a replay -------------------------------------------------------------------------------


@pytest.mark.parametrize("agreed", [True, False])
@pytest.mark.parametrize("foreign", [True, False])
def test_drift_of_replayed_weights_is_not_the_engines_fault(lab: Lab, agreed: bool, foreign: bool) -> None:
    """Weights that drifted by rounding put every token a little off; samples put in later stand out from that."""
    steps = replaced_rollouts(lab, forge_seeds=True) if foreign else lab.steps.batches
    leader = lab.healthy("olmo_core")
    leader.restore_state(lab.steps.versions[0])

    def drifted(batch: ReplayBatch, version: int) -> StoredScores:
        rng = np.random.default_rng(version)
        scores = {
            key: values + 1e-5 * rng.standard_t(3, len(values))
            for key, values in StoredLogprobs().score(batch.groups).items()
        }
        return StoredScores(scores=scores, batches=lab.scoring_batches(batch.groups), agreed=agreed)

    judged = bisect_replay(
        [ReplaySide(trainer=leader, config=lab.config)],
        steps,
        scratch=lab.scratch(),
        read=StateFile,
        make_reference=lab.reference,
        read_stored=drifted,
    )
    findings = Diagnosis.merged([step.diagnosis for step in judged]).findings
    verdict = bisect_report(judged, Diagnosis(), lab.config.parity).verdict
    if not agreed:
        assert (verdict, findings[0].subject) == (ParityVerdict.FAIL, "engine decode")
    elif foreign:
        (finding,) = findings
        assert (finding.cause, finding.where) == (Cause.FOREIGN_ROLLOUTS, "e0.p2-3/5, e0.p2-11/0")
        assert [step.step for step in judged][-1] == 2, "the walk ends where something is wrong"
    else:
        assert (verdict, findings) == (ParityVerdict.PASS, ())
        assert [step.name for step in judged] == ["engine decode", "olmo_core"] * 3
