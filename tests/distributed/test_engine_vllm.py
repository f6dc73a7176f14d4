"""Two real vLLM engines, started once, and real weight pushes to them from this process.

Both start with the shipped model, which scores `SUMS`, and then load random weights in its shape. Engine 0 samples at
temperature 1; engine 1 is configured for 0.7.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_lib.algo.packing import pack, unpack_tokens
from grpo_lib.config import DeadlinesConfig, RuntimeConfig, WeightSyncConfig
from grpo_lib.errors import RankFailure
from grpo_lib.ray_runtime.actor_group import ActorGroup
from grpo_lib.ray_runtime.cluster import local_cluster
from grpo_lib.ray_runtime.engine_group import EngineGroup, engine_actors
from grpo_lib.types import (
    CanaryResult,
    Completion,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    TrainingSample,
    VersionSpan,
)
from grpo_lib.weight_sync.canary import DecodeCanary
from grpo_lib.weight_sync.sync import CertifiedWeightSync
from tests.distributed.engine_parts import (
    MAX_MODEL_LEN,
    SHIPPED,
    STOP,
    VOCAB,
    EngineFactory,
    HfTrainer,
    LocalRank,
    flipping,
    request,
    tiny_qwen3,
)
from tests.distributed.gloo_ranks import RankPool
from tests.distributed.trainer_cases import OLMO_CORE

DEADLINES = DeadlinesConfig(generate_s=120.0, weight_sync_s=30.0, engine_start_s=280.0)
WAIT = {"deadline_s": 120.0, "setting": "deadlines.generate_s"}
PROMPTS = tuple(tuple(range(10 + 5 * p, 18 + 6 * p)) for p in range(4))  # 8 … 11 tokens
LONG_PROMPT = tuple(range(20, 90))  # two full cache blocks
# "<|user|>x+y=<|assistant|>" and the right answer with its stop token, in the shipped tokenizer's ids
SUMS = tuple(
    ((3, *(ord(c) - 25 for c in f"{x}+{y}="), 4), np.array([*(ord(c) - 25 for c in str(x + y)), 1]))
    for x, y in ((1, 2), (13, 4), (84, 7), (99, 9), (50, 0))
)
FP32 = 1e-5  # nats between two correct fp32 implementations of this model


@dataclass
class Stack:
    actors: ActorGroup
    engines: EngineGroup
    trainer: HfTrainer
    folder: Path
    sums: list[np.ndarray]  # log-probabilities of the answers of `SUMS` by the shipped model

    def __post_init__(self) -> None:
        self.sync = self.sync_with()

    def one(self, index: int, method: str, *args: Any) -> Any:
        return self.actors.call_one(index, method, *args, **WAIT)

    def generate(self, index: int, requests: Sequence[GenerationRequest]) -> dict[str, Completion]:
        self.one(index, "submit", requests)
        done: dict[str, Completion] = {}
        deadline = time.monotonic() + 60
        while len(done) < len(requests):
            assert time.monotonic() < deadline
            done |= {c.request_id: c for c in self.one(index, "poll", 1.0)}
        return done

    def worst(self, requests: Sequence[GenerationRequest], done: dict[str, Completion], **scoring: Any) -> float:
        """Largest |engine - trainer| log-probability."""
        pairs = [(r.prompt_token_ids, done[r.request_id].token_ids) for r in requests]
        scores = self.trainer.score(pairs, **scoring)
        return max(float(np.abs(done[r.request_id].logprobs - s).max()) for r, s in zip(requests, scores, strict=True))

    def sync_with(self, **parts: Any) -> CertifiedWeightSync:
        """A weight sync of its own channel, with one part replaced."""
        canary = DecodeCanary(
            prompts=PROMPTS,
            sampling=SamplingParams(temperature=1.0, max_tokens=6, stop_token_ids=STOP),
            decode=self.engines.decode_everywhere,
            score=self.trainer.score,
            tolerance=5e-5,
        )
        arguments: dict[str, Any] = {
            "ranks": LocalRank(self.trainer),
            "engines": self.engines,
            "config": WeightSyncConfig(canary_every=3),
            "deadlines": DEADLINES,
            "canary": canary,
        }
        return CertifiedWeightSync(**(arguments | parts))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("model")
    with local_cluster(RuntimeConfig(), num_cpus=2):
        trainer = HfTrainer(tiny_qwen3(seed=0))
        trainer.model.save_pretrained(folder)
        factories = [EngineFactory(SHIPPED, "engine 0", 1.0), EngineFactory(SHIPPED, "engine 1", 0.7)]
        env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        actors = engine_actors(factories, num_cpus=1.0, env_vars=env)
        actors.start(deadline_s=280.0, setting="deadlines.engine_start_s")
        engines = EngineGroup(actors, deadlines=DEADLINES)
        sums = actors.call_one(0, "score", [([*p, *a.tolist()], len(p)) for p, a in SUMS], **WAIT)
        engines.pause()
        engines.load_weights(folder, 0)
        engines.resume()
        stack = Stack(actors, engines, trainer, folder, sums)
        stack.sync.connect()
        yield stack
        actors.close()


# -- the shipped model -------------------------------------------------------------------------------------------------


def score_sums(rank: int, num_ranks: int) -> list[np.ndarray]:
    """OLMo-core's log-probabilities of the answers, from one pack."""
    batch = pack(
        [
            TrainingSample(
                sample_id=str(index),
                input_ids=np.array([*prompt, *answer]),
                response_mask=np.arange(len(prompt) + len(answer)) >= len(prompt),
                advantages=np.zeros(len(prompt) + len(answer), np.float32),
                rollout_logprobs=np.zeros(len(prompt) + len(answer), np.float32),
            )
            for index, (prompt, answer) in enumerate(SUMS)
        ],
        32,
    )
    scores = unpack_tokens(batch, OLMO_CORE.build(rank, num_ranks, SHIPPED, temperature=1.0).logprobs(batch))
    return [scores[str(index)] for index in range(len(SUMS))]


def test_the_shipped_weights_mean_the_same_to_vllm_olmo_core_and_hugging_face(stack: Stack, one_rank: RankPool) -> None:
    by_vllm = np.concatenate(stack.sums)
    by_olmo_core = np.concatenate(one_rank.run(score_sums)[0])
    model = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32).eval()
    by_hugging_face = np.concatenate(HfTrainer(model).score(SUMS))
    assert len(by_vllm) == sum(len(answer) for _, answer in SUMS)
    assert np.abs(by_vllm - by_hugging_face).max() < FP32
    assert np.abs(by_olmo_core - by_hugging_face).max() < 2e-6
    assert by_hugging_face.mean() > -1, "the model knows its sums, so these are its weights"
    random = np.concatenate(stack.trainer.score(SUMS))
    assert np.abs(random - by_hugging_face).max() > 1, "other weights would be noticed"


# -- sampling ----------------------------------------------------------------------------------------------------------


def test_decode_equals_score_exactly_and_the_trainer_closely(stack: Stack) -> None:
    requests = [request(f"p{p}/{k}", PROMPTS[p], seed=100 * p + k, max_tokens=12) for p in range(4) for k in range(8)]
    done = stack.generate(0, requests)
    sequences = [
        ([*r.prompt_token_ids, *done[r.request_id].token_ids.tolist()], len(r.prompt_token_ids)) for r in requests
    ]
    scores = stack.one(0, "score", sequences)
    for r, score in zip(requests, scores, strict=True):
        np.testing.assert_array_equal(score, done[r.request_id].logprobs)
        assert score.dtype == np.float32
    assert stack.worst(requests, done) < FP32
    assert stack.worst(requests, done, temperature=0.9) > 1e-2, "the comparison must be able to fail"


def test_seeds_decide_the_sample_and_nothing_else_does(stack: Stack) -> None:
    group = [request(f"a{k}", PROMPTS[0], seed=k, max_tokens=12) for k in range(16)]
    first = stack.generate(0, group)
    assert len({tuple(c.token_ids) for c in first.values()}) > 12, "members of a group differ"
    assert {c.seed for c in first.values()} == set(range(16))
    other_company = [request(f"b{k}", PROMPTS[1], seed=k) for k in range(5)]
    again = stack.generate(0, [*other_company, *(request(f"c{k}", PROMPTS[0], seed=k, max_tokens=12) for k in (9, 3))])
    for k in (9, 3):
        np.testing.assert_array_equal(again[f"c{k}"].token_ids, first[f"a{k}"].token_ids)
        np.testing.assert_array_equal(again[f"c{k}"].logprobs, first[f"a{k}"].logprobs)


@pytest.mark.parametrize(("temperature", "top_k"), [(0.7, 0), (1.6, 0), (1.0, 2)])
def test_logprobs_are_those_of_the_distribution_sampled_from(stack: Stack, temperature: float, top_k: int) -> None:
    requests = [
        request(f"t{k}", PROMPTS[k % 4], seed=k, max_tokens=10, temperature=temperature, top_k=top_k) for k in range(12)
    ]
    done = stack.generate(0, requests)
    assert stack.worst(requests, done, temperature=temperature, top_k=top_k) < FP32
    assert stack.worst(requests, done) > 0.1, "raw log-probabilities would be noticed (open-instruct 1678, trl 7269)"


def test_greedy_picks_the_argmax_and_reports_at_the_runs_temperature(stack: Stack) -> None:
    for index, temperature in ((0, 1.0), (1, 0.7)):
        requests = [
            request(f"g{p}", PROMPTS[p], seed=5, max_tokens=10, greedy=True, temperature=temperature) for p in range(4)
        ]
        mixed = [request(f"m{p}", PROMPTS[p], seed=p, temperature=temperature) for p in range(4)]
        done = stack.generate(index, requests + mixed)
        for r in requests:
            token_ids = done[r.request_id].token_ids
            np.testing.assert_array_equal(token_ids, stack.trainer.argmax(r.prompt_token_ids, token_ids))
        assert stack.worst(requests + mixed, done, temperature=temperature) < FP32
    with pytest.raises(RankFailure, match=r"greedy log-probabilities .* not at 0.7"):
        stack.one(0, "submit", [request("g", PROMPTS[0], seed=0, greedy=True, temperature=0.7)])


def test_scoring_at_another_temperature_is_refused(stack: Stack) -> None:
    with pytest.raises(RankFailure, match=r"ValueError.*rollout.temperature=0.7.*temperature 1 only"):
        stack.one(1, "score", [([3, 4, 5], 1)])


def test_the_longest_sequence_can_be_scored_and_a_longer_one_is_refused(stack: Stack) -> None:
    longest = [3 + k % 200 for k in range(MAX_MODEL_LEN)]
    (score,) = stack.one(0, "score", [(longest, 1)])
    (by_trainer,) = stack.trainer.score([((longest[0],), np.array(longest[1:]))])
    assert np.abs(score - by_trainer).max() < FP32
    for sequence in (([*longest, 3], 1), ([3, 4], 2), ([3, 4], 0)):
        with pytest.raises(RankFailure, match=r"ValueError: sequence 0: .*at most 128 in all"):
            stack.one(0, "score", [sequence])


def test_every_stop_token_ends_a_completion_and_is_part_of_it(stack: Stack) -> None:
    stops = tuple(range(0, VOCAB, 3))
    requests = [request(f"s{k}", PROMPTS[k % 4], seed=k, max_tokens=4, stop_token_ids=stops) for k in range(40)]
    done = stack.generate(0, requests)
    endings: set[int] = set()
    for completion in done.values():
        stopped = [int(token) in stops for token in completion.token_ids]
        assert not any(stopped[:-1])
        if completion.finish_reason is FinishReason.STOP:
            assert stopped[-1]
            endings.add(int(completion.token_ids[-1]))
        else:
            assert (completion.finish_reason, len(stopped), stopped[-1]) == (FinishReason.LENGTH, 4, False)
        assert completion.latency_s > 0
    assert len(endings) > 5
    assert {c.finish_reason for c in done.values()} == {FinishReason.STOP, FinishReason.LENGTH}


def begin_long(stack: Stack, keys: Sequence[str], seed: int = 0) -> list[GenerationRequest]:
    """Requests that are surely unfinished when this returns: the engine is paused, each has at least 3 tokens."""
    requests = [
        request(key, PROMPTS[0], seed=seed + k, max_tokens=100, stop_token_ids=()) for k, key in enumerate(keys)
    ]
    stack.one(0, "submit", requests)
    deadline = time.monotonic() + 30
    while min(stack.one(0, "progress").values(), default=0) < 3:
        assert time.monotonic() < deadline
    stack.one(0, "pause")
    return requests


def test_an_aborted_fragment_is_never_a_natural_stop(stack: Stack) -> None:
    begin_long(stack, ["x0", "x1", "x2"])
    fragments = stack.one(0, "abort", ["x0", "x2", "unknown"])
    stack.one(0, "resume")
    assert {c.request_id for c in fragments} == {"x0", "x2"}
    for fragment in fragments:
        assert fragment.finish_reason is FinishReason.ABORT
        assert 3 <= len(fragment.token_ids) < 100
    rest: list[Completion] = []
    while not rest:
        rest += stack.one(0, "poll", 1.0)
    assert [(c.request_id, c.finish_reason, len(c.token_ids)) for c in rest] == [("x1", FinishReason.LENGTH, 100)]


def test_states_refuse_what_would_mix_weights(stack: Stack) -> None:
    def attempt(method: str, *args: Any) -> str:
        return stack.one(0, "attempt", method, *args)

    some = [request("r", PROMPTS[0], seed=0)]
    assert "engine 0 is running; start_weight_update is legal only while awake or paused" in attempt(
        "start_weight_update"
    )
    assert "legal only while awake or paused" in attempt("load_weights", stack.folder, 1)
    assert "legal only while paused" in attempt("resume")
    assert "legal only while updating" in attempt("update_weights", {"update_info": {}})
    stack.one(0, "pause")
    assert attempt("pause") == ""
    assert "is paused; submit is legal only while running" in attempt("submit", some)
    assert "is paused; score is legal" in attempt("score", [([3, 4], 1)])
    assert "finish_weight_update is legal only while updating" in attempt("finish_weight_update")
    assert "commit_weights is legal only while updating" in attempt("commit_weights", 1)
    stack.one(0, "resume")
    stack.one(0, "pause")
    stack.one(0, "start_weight_update")
    assert "resume is legal only while paused" in attempt("resume")
    assert "commit_weights before the update has finished" in attempt("commit_weights", 1)
    stack.one(0, "finish_weight_update")  # nothing was sent: vLLM keeps the weights it has
    assert "finish_weight_update after the update has finished" in attempt("finish_weight_update")
    assert "update_weights after the update has finished" in attempt("update_weights", {"update_info": {}})
    assert "is updating; resume" in attempt("resume"), "an update without a version is not sampled from"
    (receipt,) = stack.one(0, "commit_weights", 0)
    assert (dict(receipt.checksums), len(receipt.unloaded)) == ({}, len(set(receipt.unloaded)))
    assert "model.embed_tokens.weight" in receipt.unloaded
    stack.one(0, "resume")
    with pytest.raises(RankFailure, match="already in flight"):
        stack.one(0, "submit", [*some, *some])


# -- weights -----------------------------------------------------------------------------------------------------------


def check_engines(stack: Stack, key: str) -> float:
    """Largest difference of both engines from the trainer, on prompts that the prefix cache knows and others."""
    worst = 0.0
    for index in (0, 1):
        requests = [request(f"{key}{p}", prompt, seed=p) for p, prompt in enumerate((*PROMPTS, LONG_PROMPT))]
        worst = max(worst, stack.worst(requests, stack.generate(index, requests)))
    return worst


def test_push_is_certified_and_engines_sample_from_the_new_weights(stack: Stack) -> None:
    assert check_engines(stack, "before") < FP32
    for number in range(4):
        stack.trainer.change(seed=number)
        certificate = stack.sync.push(stack.trainer.policy_version)
        assert certificate.ok, certificate
        assert certificate.engine_versions == (stack.trainer.policy_version,) * 2
        assert certificate.num_tensors == len(stack.trainer.manifest().entries)
        assert certificate.num_bytes == sum(p.numel() * 4 for p in stack.trainer.model.parameters())
        assert (certificate.canary is not None) == (number % 3 == 0), "first push and every third"
        if certificate.canary is not None:
            assert certificate.canary.num_tokens >= 8
        assert 0 < certificate.transfer_s < 5
        assert check_engines(stack, f"after{number}") < FP32
    assert stack.engines.policy_version == stack.trainer.policy_version


def test_weights_changed_under_a_request_split_its_version_spans(stack: Stack) -> None:
    requests = begin_long(stack, ["i0", "i1"], seed=50)
    old_version = stack.trainer.policy_version
    old = HfTrainer(tiny_qwen3(seed=0))
    old.model.load_state_dict(stack.trainer.model.state_dict())
    stack.trainer.change(seed=77)
    assert stack.sync.push(stack.trainer.policy_version).ok  # resumes
    done: dict[str, Completion] = {}
    while len(done) < 2:
        done |= {c.request_id: c for c in stack.one(0, "poll", 1.0)}
    for r in requests:
        completion = done[r.request_id]
        first, second = completion.version_spans
        assert first == VersionSpan(version=old_version, start=0, stop=second.start)
        assert second == VersionSpan(version=old_version + 1, start=first.stop, stop=100)
        assert first.stop >= 3
        pair = [(r.prompt_token_ids, completion.token_ids)]
        by_old, by_new = old.score(pair)[0], stack.trainer.score(pair)[0]
        cut = first.stop
        assert np.abs(completion.logprobs[:cut] - by_old[:cut]).max() < FP32
        assert np.abs(completion.logprobs[cut:] - by_new[cut:]).max() < FP32
        assert np.abs(completion.logprobs[cut:] - by_old[cut:]).max() > 1e-2


def test_a_stale_prefix_cache_would_be_noticed(stack: Stack) -> None:
    stack.generate(0, [request("warm", LONG_PROMPT, seed=1)])  # now in the cache
    stack.one(0, "keep_prefix_cache", True)
    try:
        stack.trainer.change(seed=5)
        stack.sync.push(stack.trainer.policy_version)
        requests = [request("stale", LONG_PROMPT, seed=1)]
        assert stack.worst(requests, stack.generate(0, requests)) > 1e-3, "NeMo-RL 4018, prime-rl 1650"
    finally:
        stack.one(0, "keep_prefix_cache", False)
    stack.trainer.change(seed=6)
    assert stack.sync.push(stack.trainer.policy_version).ok
    assert check_engines(stack, "fresh") < FP32


def test_a_skipped_root_parameter_is_named_and_engines_stay_paused(stack: Stack) -> None:
    broken = HfTrainer(stack.trainer.model, stack.trainer.policy_version, left_out=frozenset({"model.norm.weight"}))
    sync = stack.sync_with(ranks=LocalRank(broken))
    sync.connect()
    certificate = sync.push(broken.policy_version)
    assert not certificate.ok
    assert certificate.missing == certificate.unloaded == ("model.norm.weight",)
    assert certificate.mismatched == certificate.unexpected == ()
    with pytest.raises(RankFailure, match="is paused; submit"):
        stack.engines.submit([request("z", PROMPTS[0], seed=0)])
    recover(stack)


def test_one_flipped_bit_is_named(stack: Stack) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    sync = stack.sync_with(ranks=LocalRank(stack.trainer, open_channel=flipping(name)))
    sync.connect()
    certificate = sync.push(stack.trainer.policy_version)
    assert certificate.mismatched == (name,)
    assert not certificate.ok
    recover(stack)


def recover(stack: Stack) -> None:
    """A later complete push over a new channel makes paused engines usable again."""
    stack.sync = stack.sync_with()
    stack.sync.connect()
    certificate = stack.sync.push(stack.trainer.policy_version)
    assert certificate.ok, certificate
    assert check_engines(stack, "recovered") < FP32


def test_a_decode_path_with_other_weights_fails_the_canary_only(stack: Stack) -> None:
    def damaged_canary(policy_version: int) -> CanaryResult:
        stack.one(1, "damage_decoding")
        return healthy(policy_version)

    healthy = stack.sync._canary
    sync = stack.sync_with(canary=damaged_canary)
    sync.connect()
    certificate = sync.push(stack.trainer.policy_version)
    assert certificate.missing == certificate.unexpected == certificate.unloaded == certificate.mismatched == ()
    assert certificate.canary is not None
    assert certificate.canary.max_abs > certificate.canary.tolerance
    assert not certificate.ok
    recover(stack)


def test_weights_load_from_a_folder_and_a_wrong_folder_changes_nothing(stack: Stack, tmp_path: Path) -> None:
    stack.engines.pause()
    with pytest.raises(RankFailure, match=r"DataError.*does not exist"):
        stack.engines.load_weights(tmp_path / "nowhere", 90)
    stack.trainer.model.save_pretrained(tmp_path / "saved")
    stack.engines.load_weights(tmp_path / "saved", 91)
    stack.engines.resume()
    assert stack.engines.policy_version == 91
    assert check_engines(stack, "loaded") < FP32


def test_a_dead_loop_surfaces_on_the_next_call_with_its_name_and_cause(stack: Stack) -> None:
    stack.one(1, "break_step")
    stack.one(1, "submit", [request("d", PROMPTS[0], seed=0)])
    with pytest.raises(RankFailure, match="engine 1 failed: MemoryError: no block left"):
        stack.one(1, "poll", 20.0)
    with pytest.raises(RankFailure, match="engine 1 failed: MemoryError: no block left"):
        stack.one(1, "submit", [request("e", PROMPTS[0], seed=0)])
