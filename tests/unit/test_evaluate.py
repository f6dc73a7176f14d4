"""Evaluation: statistics against enumeration and simulation, the driver against a scripted engine."""

import itertools
import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from grpo_lib.config import EvaluationConfig, RunConfig, resolve
from grpo_lib.errors import DeadlineExceeded, GrpoError, StalenessError, VerifierOutage
from grpo_lib.evaluate import (
    EVALUATION_EPOCH,
    EvaluationResult,
    EvaluationTable,
    estimate,
    evaluate_policy,
    pass_at_k,
    summarize,
    warnings_of,
)
from grpo_lib.seeds import sample_seed
from grpo_lib.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    Prompt,
    Verdict,
    VerdictReason,
    VerdictState,
    VersionSpan,
)

CONFIG = EvaluationConfig(samples_per_prompt=4, pass_at=(1, 2, 4), bootstrap_resamples=500)
RIGHT, WRONG, STOP = 7, 8, 1


def prompts(count: int) -> list[Prompt]:
    return [
        Prompt(prompt_id=f"p{i}", text=f"{i}", token_ids=(2, 10 + i), answer="7", dataset="d", verifier="exact")
        for i in range(count)
    ]


@dataclass
class ScriptedEngine:
    """Answers right or wrong as `answer(request)` says; every other poll is empty, as when an engine is busy."""

    answer: Callable[[GenerationRequest], bool]
    policy_version: int = 3
    sampled_version: int = 3
    finish: FinishReason = FinishReason.STOP
    silent: bool = False
    queue: list[GenerationRequest] = field(default_factory=list)
    submitted: list[list[GenerationRequest]] = field(default_factory=list)
    busy: bool = False

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        assert not self.queue, "a portion was submitted before the last one was complete"
        self.queue = list(requests)[::-1]
        self.submitted.append(list(requests))

    def poll(self, timeout_s: float) -> list[Completion]:
        self.busy = not self.busy
        if self.busy or self.silent:
            return []
        done, self.queue = self.queue[:5], self.queue[5:]
        return [
            Completion(
                request_id=request.request_id,
                token_ids=np.array([RIGHT if self.answer(request) else WRONG, STOP], np.int64),
                logprobs=np.array([-0.5, -0.1], np.float32),
                version_spans=(VersionSpan(version=self.sampled_version, start=0, stop=2),),
                finish_reason=self.finish,
                seed=request.seed,
                latency_s=0.0,
            )
            for request in done
        ]

    def score(self, sequences: Sequence[tuple[Sequence[int], int]]) -> list[np.ndarray]:
        raise NotImplementedError

    def load_weights(self, path: Path, policy_version: int) -> None:
        raise NotImplementedError

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class ScriptedVerifiers:
    """Compares with the prompt's answer; `failing` texts get no verdict, and verdicts come one collect late."""

    failing: Callable[[str], bool] = lambda key: False
    waiting: dict[str, Verdict] = field(default_factory=dict)
    ready: dict[str, Verdict] = field(default_factory=dict)

    def submit(self, key: str, prompt: Prompt, text: str) -> None:
        right = text == prompt.answer
        reason = VerdictReason.CORRECT if right else VerdictReason.WRONG
        verdict = Verdict(state=VerdictState.VALID, reward=float(right), reason=reason)
        if self.failing(key):
            verdict = Verdict(state=VerdictState.FAILED, reward=0.0, reason=VerdictReason.TIMEOUT)
        self.waiting[key] = verdict

    def collect(self, timeout_s: float) -> dict[str, Verdict]:
        done, self.ready, self.waiting = self.ready, self.waiting, {}
        return done

    def close(self) -> None: ...


def decode(token_ids: Sequence[int]) -> str:
    return "".join(str(token) for token in token_ids if token != STOP)


def run_config(*overrides: str) -> RunConfig:
    base = ["evaluation.samples_per_prompt=4", "evaluation.pass_at=[1, 2, 4]", "evaluation.bootstrap_resamples=500"]
    return resolve("embedded_addition", [*base, "loop.prompts_per_step=2", "rollout.group_size=4", *overrides])


def evaluate(
    engine: ScriptedEngine,
    count: int = 5,
    config: RunConfig | None = None,
    verifiers: ScriptedVerifiers | None = None,
) -> EvaluationTable:
    return evaluate_policy(
        engine,
        prompts(count),
        verifiers or ScriptedVerifiers(),
        decode,
        config or run_config(),
        stop_token_ids=[STOP],
        run_seed=11,
    )


def index_of(request: GenerationRequest) -> str:
    return request.request_id.rpartition("/")[2]


# ---- statistics


@pytest.mark.parametrize(
    ("n", "c", "k"), [(n, c, k) for n in range(1, 7) for c in range(n + 1) for k in range(1, n + 1)]
)
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(n: int, c: int, k: int) -> None:
    correct = [i < c for i in range(n)]
    subsets = list(itertools.combinations(correct, k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_does_not_overflow() -> None:
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5, abs=1e-9)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, 0, 5), (4, 2, 0), (0, 0, 1), (4, -1, 1)])
def test_pass_at_k_of_nonsense(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} of {c}"):
        pass_at_k(n, c, k)


def test_interval_agrees_with_the_normal_one_where_that_holds() -> None:
    rng = np.random.default_rng(0)
    values = rng.beta(2, 2, 400)
    found = estimate(values, replace_resamples(4000), seed=1)
    half = 1.96 * values.std(ddof=1) / math.sqrt(len(values))
    assert found.value == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert found.high == pytest.approx(values.mean() + half, abs=0.1 * half)


def replace_resamples(count: int) -> EvaluationConfig:
    return CONFIG.model_copy(update={"bootstrap_resamples": count})


def test_interval_resamples_prompts_and_not_samples() -> None:
    """Each prompt is always or never solved: 1000 samples hold no more evidence than their ten prompts."""
    by_prompt = np.array([0.0, 1.0] * 5)
    clustered = estimate(by_prompt, replace_resamples(2000), seed=1)
    as_if_independent = estimate(np.repeat(by_prompt, 100), replace_resamples(2000), seed=1)
    assert clustered.high - clustered.low > 5 * (as_if_independent.high - as_if_independent.low)


def test_interval_is_repeatable_and_depends_on_the_seed() -> None:
    values = np.random.default_rng(5).random(30)
    assert estimate(values, CONFIG, seed=1) == estimate(values, CONFIG, seed=1)
    assert estimate(values, CONFIG, seed=1) != estimate(values, CONFIG, seed=2)


def test_degenerate_intervals() -> None:
    assert estimate(np.ones(4), CONFIG, seed=0).to_dict() == {"value": 1.0, "low": 1.0, "high": 1.0, "num_prompts": 4}
    assert estimate(np.array([0.25]), CONFIG, seed=0).to_dict() == {
        "value": 0.25, "low": None, "high": None, "num_prompts": 1,
    }  # fmt: skip
    assert estimate(np.array([math.nan]), CONFIG, seed=0).to_dict()["value"] is None
    assert estimate(np.array([math.nan, 0.0, 1.0]), CONFIG, seed=0).value == 0.5


# ---- the driver


def test_every_prompt_is_sampled_and_decoded_greedily() -> None:
    engine = ScriptedEngine(lambda request: index_of(request) in ("0", "greedy"))
    table = evaluate(engine)
    assert table.correct.tolist() == [1] * 5
    assert table.judged.tolist() == [4] * 5
    assert table.greedy.tolist() == [1.0] * 5
    assert table.policy_version == 3
    assert [group.group_id for group in table.groups] == [f"eval.v3.p{i}" for i in range(5)]
    assert [rollout.text for rollout in table.groups[2].rollouts] == ["7", "8", "8", "8"]
    assert table.response_tokens == 5 * 4 * 2
    requests = [request for portion in engine.submitted for request in portion]
    greedy = [request for request in requests if request.sampling.greedy]
    assert len(greedy) == 5
    assert {index_of(request) for request in greedy} == {"greedy"}
    assert {request.sampling.temperature for request in requests} == {1.0}


def test_samples_are_distinct_repeatable_and_none_of_trainings() -> None:
    engine = ScriptedEngine(lambda request: True)
    evaluate(engine)
    seeds = [request.seed for portion in engine.submitted for request in portion]
    assert len(set(seeds)) == len(seeds)
    again = ScriptedEngine(lambda request: True, policy_version=9, sampled_version=9)
    evaluate(again)
    assert [request.seed for portion in again.submitted for request in portion] == seeds
    training = {sample_seed(11, epoch, f"p{i}", j) for epoch in range(10) for i in range(5) for j in range(5)}
    assert not training & set(seeds)
    assert EVALUATION_EPOCH < 0


def test_requests_go_out_in_portions_of_a_training_step() -> None:
    engine = ScriptedEngine(lambda request: True)
    evaluate(engine)
    assert [len(portion) for portion in engine.submitted] == [8, 8, 8, 1]


def test_failed_verdicts_are_left_out_and_counted() -> None:
    """Prompt 0 has one right, two wrong and one unjudged sample; its greedy one is unjudged."""
    engine = ScriptedEngine(lambda request: index_of(request) == "0")
    verifiers = ScriptedVerifiers(failing=lambda key: key in ("eval.v3.p0/3", "eval.v3.p0/greedy"))
    table = evaluate(engine, config=run_config("verifier.max_failed_share=0.1"), verifiers=verifiers)
    assert table.num_failed == 2
    assert table.judged.tolist() == [3, 4, 4, 4, 4]
    assert table.pass_rates()[0] == pytest.approx(1 / 3)
    assert table.pass_at(2)[0] == pytest.approx(2 / 3)
    assert math.isnan(table.pass_at(4)[0])
    assert math.isnan(table.greedy[0])
    summary = summarize(table, CONFIG, seed=0)
    assert summary["pass_at_k"]["4"]["num_prompts"] == 4
    assert summary["failed_verdicts"] == 2
    assert any("2 verdicts failed" in warning for warning in summary["warnings"])


def test_a_verifier_outage_stops_the_evaluation() -> None:
    verifiers = ScriptedVerifiers(failing=lambda key: key.endswith(("/0", "/1")))
    with pytest.raises(VerifierOutage, match=r"10 of 25 verdicts failed.*max_failed_share.*timeout"):
        evaluate(ScriptedEngine(lambda request: True), verifiers=verifiers)


def test_exactly_zero_is_flagged_loudly(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="grpo_lib.evaluate"):
        table = evaluate(ScriptedEngine(lambda request: False))
    assert "none of 20 samples is correct" in caplog.text
    assert "broken verifier" in summarize(table, CONFIG, seed=0)["warnings"][0]
    assert warnings_of(evaluate(ScriptedEngine(lambda request: index_of(request) == "2"))) == []


def test_weights_that_change_on_the_way_are_noticed() -> None:
    with pytest.raises(StalenessError, match=r"version 3.*sampled by \[4\]"):
        evaluate(ScriptedEngine(lambda request: True, sampled_version=4))


def test_an_aborted_completion_is_no_answer() -> None:
    with pytest.raises(GrpoError, match=r"aborted eval\.v3\.p\d/"):
        evaluate(ScriptedEngine(lambda request: True, finish=FinishReason.ABORT))


def test_truncated_completions_are_judged_and_counted() -> None:
    table = evaluate(ScriptedEngine(lambda request: True, finish=FinishReason.LENGTH))
    assert table.num_truncated == 20
    assert summarize(table, CONFIG, seed=0)["truncated_share"] == 1.0


def test_a_silent_engine_ends_at_its_deadline() -> None:
    with pytest.raises(DeadlineExceeded, match=r"evaluation: 8 of 8 completions.*deadlines\.generate_s"):
        evaluate(ScriptedEngine(lambda request: True, silent=True), config=run_config("deadlines.generate_s=0.01"))


def test_verdicts_that_never_come_end_at_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(ScriptedVerifiers):
        def collect(self, timeout_s: float) -> dict[str, Verdict]:
            return {}

    monkeypatch.setattr("grpo_lib.pipeline._VERDICT_GRACE_S", 0.0)
    with pytest.raises(DeadlineExceeded, match=r"25 of 25 verdicts.*verifier\.timeout_s"):
        evaluate(
            ScriptedEngine(lambda request: True), config=run_config("verifier.timeout_s=0.001"), verifiers=Silent()
        )


# ---- before and after


def test_result_is_a_plain_dict_with_a_paired_gain() -> None:
    before = evaluate(ScriptedEngine(lambda request: index_of(request) == "0"))
    after = evaluate(ScriptedEngine(lambda request: index_of(request) in ("0", "1", "greedy"), sampled_version=3))
    plain = EvaluationResult(before=before, after=replace(after, policy_version=9), config=CONFIG, seed=1).to_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["before"]["sampled_pass_at_1"]["value"] == 0.25
    assert plain["after"]["sampled_pass_at_1"]["value"] == 0.5
    assert plain["before"]["greedy_pass_at_1"]["value"] == 0.0
    assert plain["gain"]["greedy_pass_at_1"]["value"] == 1.0
    # Every prompt gained exactly a quarter, so pairing leaves no doubt at all.
    assert plain["gain"]["sampled_pass_at_1"] == {"value": 0.25, "low": 0.25, "high": 0.25, "num_prompts": 5}
    assert plain["before"]["pass_at_k"]["2"]["value"] == pytest.approx(0.5)


def test_pairing_is_refused_for_other_prompts() -> None:
    before = evaluate(ScriptedEngine(lambda request: True), count=4)
    after = evaluate(ScriptedEngine(lambda request: True), count=5)
    with pytest.raises(ValueError, match="same prompts"):
        EvaluationResult(before=before, after=after, config=CONFIG, seed=1).to_dict()
