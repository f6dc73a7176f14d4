"""The loop's order and guards, against hand-written parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from grpo_lib import loop
from grpo_lib.config import RunConfig
from grpo_lib.errors import (
    DeadlineExceeded,
    MismatchError,
    NoLearningSignal,
    StalenessError,
    VerifierOutage,
    WeightSyncError,
)
from grpo_lib.loop import LoopState, fit
from grpo_lib.pipeline import RolloutPipeline, StepRollouts
from grpo_lib.types import (
    FinishReason,
    GroupStatus,
    Prompt,
    TrainingSample,
    Verdict,
    VerdictReason,
    VerdictState,
)
from tests.unit.fakes import (
    STOP,
    FakeEngine,
    FakePrompts,
    FakeRecorder,
    FakeSync,
    FakeTrainer,
    FakeVerifiers,
    hopeless,
    mixed,
    small_config,
    valid,
)


def spell(token_ids: Sequence[int]) -> str:
    return " ".join(str(i) for i in token_ids if i != STOP)


@dataclass
class Run:
    """All parts of a loop, sharing one journal."""

    judge: object = mixed
    sections: dict[str, dict[str, object]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.config = small_config(**self.sections)
        self.journal: list[str] = []
        self.engine = FakeEngine(self.journal)
        self.trainer = FakeTrainer(self.journal)
        self.sync = FakeSync(self.journal, self.engine)
        self.recorder = FakeRecorder(self.journal)
        self.prompts = FakePrompts()

    def fit(self, state: LoopState | None = None) -> LoopState:
        pipeline = RolloutPipeline(
            config=self.config,
            engine=self.engine,
            prompts=self.prompts,
            verifiers=FakeVerifiers(self.judge),  # type: ignore[arg-type]  # a plain function
            decode=spell,
            stop_token_ids=(STOP,),
        )
        return fit(
            self.config,
            trainer=self.trainer,
            sync=self.sync,
            pipeline=pipeline,
            recorder=self.recorder,
            state=state or LoopState(),
        )


def test_order_of_a_run() -> None:
    run = Run()
    state = run.fit()
    assert state == LoopState(steps_done=3, empty_steps=0)
    step = ["forward_backward", "optim_step"]
    assert run.journal == [
        "push v0", "submit 8 at v0", "store rollouts 1", *step, "push v1", "flush",
        "submit 8 at v1", "store rollouts 2", *step, "push v2", "flush", "checkpoint 2",
        "submit 8 at v2", "store rollouts 3", *step, "push v3", "flush", "checkpoint 3",
    ]  # fmt: skip
    assert [record.policy_version for record in run.recorder.records] == [1, 2, 3]


def test_engines_sleep_only_while_weights_change() -> None:
    """A step without signal trains nothing and pushes nothing, and engines that slept would not be woken."""
    sleeping: dict[str, dict[str, object]] = {"rollout": {"sleep_while_training": True}}
    run = Run(sections=sleeping)
    run.fit()
    step = ["release", "forward_backward", "optim_step"]
    assert run.journal[:7] == ["push v0", "submit 8 at v0", "store rollouts 1", *step, "push v1"]
    idle = Run(judge=lambda prompt, text: valid(0.0), sections=sleeping)
    idle.fit()
    assert "release" not in idle.journal


def test_the_first_push_carries_the_restored_version() -> None:
    """open-instruct 1627, prime-rl 3004, AReaL 1342: after a resume the engine must not sample from the base model."""
    run = Run()
    run.trainer.version = 7
    run.prompts.position = 4
    run.fit(LoopState(steps_done=2))
    assert run.journal[:2] == ["push v7", "submit 8 at v7"]
    assert [record.step for record in run.recorder.records] == [3]


def test_no_rollout_without_a_certified_push() -> None:
    run = Run()
    run.sync.broken = True
    with pytest.raises(WeightSyncError, match=r"model\.norm\.weight"):
        run.fit()
    assert run.journal == ["push v0"]
    assert len(run.recorder.certificates) == 1, "the evidence is kept"


@pytest.mark.parametrize(("trained", "sampled_by"), [(0, -1), (7, 0)])
def test_a_skipped_first_push_is_noticed(monkeypatch: pytest.MonkeyPatch, trained: int, sampled_by: int) -> None:
    """The sabotage of the two tests above: the engine starts with what it had, and its tokens give that away."""
    run = Run()
    run.trainer.version, run.engine.version = trained, sampled_by
    monkeypatch.setattr(loop, "_certified_push", lambda *_: None)
    with pytest.raises(StalenessError, match=rf"versions {sampled_by} … {sampled_by} while the trainer .* {trained}"):
        run.fit()
    assert "forward_backward" not in run.journal


def test_a_group_without_spread_is_counted_and_not_trained() -> None:
    def first_is_hopeless(prompt: Prompt, text: str) -> Verdict:
        return valid(0.0) if prompt.answer == "0" else mixed(prompt, text)

    run = Run(judge=first_is_hopeless, sections={"loop": {"steps": 1}})
    run.fit()
    metrics = run.recorder.records[0].metrics
    assert (metrics["group/kept"], metrics["group/zero_spread_low"]) == (1, 1)
    assert metrics["reward/mean"] == pytest.approx(2 / 8), "all eight samples, trained or not"
    (plan,) = run.trainer.plans
    trained = {name for rank in plan.micro_batches for batch in rank for row in batch.sample_ids for name in row}
    assert trained == {f"e0.sums-train-000001/{index}" for index in range(4)}
    assert run.trainer.denominators == [8.0]


def test_a_step_without_signal_is_not_applied() -> None:
    """TRL 1.16: momentum moved the weights of steps whose groups had no spread."""
    run = Run(judge=hopeless, sections={"loop": {"steps": 2}})
    run.fit()
    assert "optim_step" not in run.journal
    assert run.trainer.version == 0
    assert [record.applied for record in run.recorder.records] == [False, False]
    assert run.recorder.records[0].metrics["group/zero_spread_low"] == 2
    assert run.recorder.records[0].metrics["optim/applied"] == 0.0
    assert run.journal.count("push v0") == 1, "unchanged weights are not sent again"


def test_training_on_groups_without_spread_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sabotage of the test above: samples of any group, whose advantages of 0 leave momentum to move the policy."""

    def whatever_the_status(config: RunConfig, rollouts: StepRollouts) -> list[TrainingSample]:
        kept = [replace(assessment, status=GroupStatus.KEPT) for assessment in rollouts.assessments]
        return trainable_samples(config, replace(rollouts, assessments=tuple(kept)))

    trainable_samples = loop.trainable_samples
    monkeypatch.setattr(loop, "trainable_samples", whatever_the_status)
    run = Run(judge=hopeless, sections={"loop": {"steps": 2}})
    run.fit()
    assert run.journal.count("optim_step") == 2
    assert run.trainer.version == 2


def test_endless_hopelessness_stops_with_the_numbers() -> None:
    """prime-rl 3015, open-instruct 1660."""
    run = Run(judge=hopeless, sections={"loop": {"steps": 50}})
    with pytest.raises(NoLearningSignal, match=r"3 steps in a row .* mean reward 0\.000.*loop\.max_empty_steps"):
        run.fit()
    assert len(run.recorder.records) == 3, "the steps before the stop are recorded"


def test_a_run_that_has_done_its_steps_ends_well_whatever_the_last_ones_taught() -> None:
    """A policy that solved its task in the last steps is a result to export, not a reason to stop."""
    run = Run(judge=hopeless, sections={"loop": {"steps": 3, "max_empty_steps": 3}})
    assert run.fit() == LoopState(steps_done=3, empty_steps=3)


def test_the_count_of_empty_steps_survives_a_resume() -> None:
    run = Run(judge=hopeless, sections={"loop": {"steps": 50}})
    with pytest.raises(NoLearningSignal):
        run.fit(LoopState(steps_done=10, empty_steps=2))
    assert len(run.recorder.records) == 1


def test_active_sampling_draws_until_enough_groups_have_spread() -> None:
    def only_every_third(prompt: Prompt, text: str) -> Verdict:
        return mixed(prompt, text) if int(prompt.answer) % 3 == 0 else valid(0.0)

    run = Run(judge=only_every_third, sections={"loop": {"steps": 1, "active_sampling": True}})
    run.fit()
    metrics = run.recorder.records[0].metrics
    assert metrics["group/kept"] == 2
    assert run.prompts.position == 4, "prompts 0, 1 then 2, then 3"
    assert metrics["batch/draws"] == 3
    assert metrics["reward/mean"] == pytest.approx(2 * 0.5 / 4), "dropped groups still count in the metrics"


def test_active_sampling_is_bounded() -> None:
    run = Run(judge=hopeless, sections={"loop": {"active_sampling": True, "max_draws_per_step": 3}})
    with pytest.raises(NoLearningSignal, match=r"0 of 2 groups .* after 3 draws of 6 prompts"):
        run.fit()
    assert "optim_step" not in run.journal


def test_members_of_a_group_have_distinct_seeds() -> None:
    """UniRL 208, verl 6857."""
    run = Run()
    run.fit()
    assert len(run.engine.seeds) == 24
    assert len(set(run.engine.seeds)) == 24


def test_a_rerun_asks_for_the_same_samples() -> None:
    first, second = Run(), Run()
    first.fit()
    second.fit()
    assert first.engine.seeds == second.engine.seeds


def test_tokens_older_than_allowed_stop_the_run() -> None:
    run = Run()
    run.engine.token_version = lambda version: max(0, version - 1)
    with pytest.raises(StalenessError, match=r"versions 0 … 0 while the trainer is at version 1"):
        run.fit()


def test_tokens_of_a_future_version_stop_the_run() -> None:
    run = Run()
    run.engine.token_version = lambda version: version + 1
    with pytest.raises(StalenessError):
        run.fit()


def test_aborted_fragments_are_never_trained() -> None:
    """vLLM's pause mode "abort" returns fragments that look like natural stops."""
    run = Run(sections={"loop": {"steps": 1}})
    run.engine.finish = FinishReason.ABORT
    run.fit()
    assert run.recorder.records[0].applied is False
    assert run.recorder.records[0].metrics["group/excluded"] == 2


def test_an_outage_of_the_verifier_stops_the_run() -> None:
    """NeMo-RL 2207: an infrastructure failure is not a reward of zero."""

    def broken(prompt: Prompt, text: str) -> Verdict:
        if text.startswith("21"):
            cause = "verifier 'integer' raised ZeroDivisionError: no such luck"
            return Verdict(state=VerdictState.FAILED, reward=0.0, reason=VerdictReason.CRASH, extracted=cause)
        return mixed(prompt, text)

    run = Run(judge=broken)
    named = r"rollouts: 2 of 8 verdicts failed.*e0\.sums-train-000000/1: crash verifier 'integer' raised ZeroDivision"
    with pytest.raises(VerifierOutage, match=named):
        run.fit()
    assert "forward_backward" not in run.journal


def test_a_tolerated_failure_leaves_only_that_sample_out() -> None:
    def broken(prompt: Prompt, text: str) -> Verdict:
        if text.startswith("21"):
            return Verdict(state=VerdictState.FAILED, reward=0.0, reason=VerdictReason.TIMEOUT)
        return mixed(prompt, text)

    run = Run(judge=broken, sections={"loop": {"steps": 1}, "verifier": {"max_failed_share": 0.5}})
    run.fit()
    assert run.recorder.records[0].metrics["batch/samples"] == 6


def test_a_silent_engine_meets_the_deadline() -> None:
    run = Run(sections={"deadlines": {"generate_s": 0.05}})
    run.engine.poll = lambda timeout_s: []  # type: ignore[method-assign]  # an engine that never answers
    with pytest.raises(DeadlineExceeded, match=r"8 of 8 completions did not arrive .* deadlines\.generate_s"):
        run.fit()


def test_the_denominator_is_global() -> None:
    run = Run(sections={"loop": {"steps": 1}})
    run.fit()
    plan = run.trainer.plans[0]
    assert run.trainer.denominators == [16.0], "8 samples of 2 tokens, over both ranks"
    assert [len(rank) for rank in plan.micro_batches] == [len(plan.micro_batches[0])] * 2


def test_a_constant_denominator_is_passed_as_configured() -> None:
    run = Run(
        sections={"loop": {"steps": 1}, "algorithm": {"loss_denominator": "constant", "constant_denominator": 40}}
    )
    run.fit()
    assert run.trainer.denominators == [40.0]


def test_reference_logprobs_reach_the_trainer() -> None:
    run = Run(sections={"loop": {"steps": 1}, "algorithm": {"kl_beta": 0.1}})
    run.trainer.has_reference = True
    run.fit()
    batch = run.trainer.plans[0].micro_batches[0][0]
    assert batch.ref_logprobs is not None
    assert (batch.ref_logprobs == batch.rollout_logprobs - 0.5).all()


def test_times_of_every_step_add_up() -> None:
    run = Run()
    run.fit()
    assert len(run.recorder.records) == 3
    for record in run.recorder.records:
        times = {name: value for name, value in record.metrics.items() if name.startswith("time/")}
        parts = sum(v for n, v in times.items() if n not in ("time/step_s", "time/group_latency_max_s", "time/other_s"))
        assert parts + times["time/other_s"] == pytest.approx(times["time/step_s"], abs=1e-12)


def test_a_correction_that_masks_most_tokens_stops_the_run() -> None:
    """NeMo-RL 2269: weights that collapse leave a step with nothing but its last few tokens, silently."""
    run = Run(sections={"algorithm": {"correction": "mask"}})
    run.trainer.masked_share = 0.6
    with pytest.raises(MismatchError, match=r"leaves out 60\.0% .*max_masked_share \(0\.5\)"):
        run.fit()
    assert "optim_step" not in run.journal
    assert run.trainer.version == 0
