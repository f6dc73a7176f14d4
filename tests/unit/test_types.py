"""The contracts: what they refuse, how they merge, and that they cross a process boundary."""

import math
import pickle
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
import torch

from grpo_lib.algo.packing import pack, plan_step
from grpo_lib.errors import ConfigError, DeadlineExceeded, NonFiniteLogprobs
from grpo_lib.types import (
    CanaryResult,
    Completion,
    FinishReason,
    PackedBatch,
    Prompt,
    Reduction,
    RolloutGroup,
    ShardedTensor,
    ShardPlan,
    Stat,
    StepMetrics,
    StepPlan,
    SyncCertificate,
    TrainingSample,
    VersionSpan,
)
from tests.unit.algo_cases import make_group, make_rollout, make_sample


def batch() -> PackedBatch:
    return pack([make_sample("a", 2, 3), make_sample("b", 1, 2)], 10)


def certificate(**changes: object) -> SyncCertificate:
    good = SyncCertificate(
        policy_version=3, engine_versions=(3, 3), num_tensors=1, num_bytes=4, transfer_s=0.1, missing=(),
        unexpected=(), unloaded=(), mismatched=(), checksum="c",
        canary=CanaryResult(num_tokens=8, max_abs=1e-6, mean_abs=1e-7, tolerance=1e-5, seconds=0.1),
    )  # fmt: skip
    return replace(good, **changes)


def completion(**changes: object) -> Completion:
    return replace(make_rollout(0, 1.0, tokens=(7, 8, 1)).completion, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": np.array([7, 8, 1], np.int32)}, "token_ids must be int64"),
        ({"logprobs": np.zeros(3)}, "logprobs float32, got int64 and float64"),
        ({"logprobs": np.zeros(2, np.float32)}, r"\(3,\) token ids but \(2,\) logprobs"),
        ({"version_spans": ()}, "cover 0 of 3 tokens"),
        ({"version_spans": (VersionSpan(version=0, start=0, stop=2),)}, "cover 2 of 3 tokens"),
        ({"version_spans": (VersionSpan(version=0, start=1, stop=3),)}, "leave a gap"),
        ({"version_spans": (VersionSpan(version=0, start=0, stop=0),)}, "leave a gap"),
    ],
)
def test_completion_refuses(changes: dict, message: str):
    with pytest.raises(ValueError, match=f"r0: .*{message}"):
        completion(**changes)


def test_group_refuses_members_out_of_order_and_names_its_samples():
    with pytest.raises(ValueError, match=r"e0\.p0: sample indices \[1, 0\]"):
        make_group([make_rollout(1, 0.0), make_rollout(0, 1.0)])
    assert make_group([make_rollout(0, 0.0)]).sample_id(0) == "e0.p0/0"


def test_prompt_refuses_no_tokens():
    with pytest.raises(ValueError, match="'p9' has no tokens"):
        Prompt(prompt_id="p9", text="", token_ids=(), answer="", dataset="d", verifier="integer")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantages": np.zeros(2, np.float32)}, r"advantages \(2,\) is not \[5\]"),
        ({"response_mask": np.ones(5, np.bool_)}, "needs a prompt token"),
    ],
)
def test_training_sample_refuses(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        replace(make_sample("a", 2, 3), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": torch.zeros(1, 9, dtype=torch.int64)}, r"labels: \(1, 9\) torch.int64, expected \(1, 10\)"),
        ({"advantages": torch.zeros(1, 10, dtype=torch.float64)}, "advantages: .*float64, expected .*float32"),
        ({"response_mask": torch.zeros(1, 10)}, "response_mask"),
        ({"ref_logprobs": torch.zeros(1, 10, dtype=torch.bfloat16)}, "ref_logprobs"),
        ({"sample_ids": ()}, "sample ids of 0 rows"),
    ],
)
def test_packed_batch_refuses(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        replace(batch(), **changes)


def test_packed_batch_attaches_policies_one_at_a_time():
    old, ref = torch.full((1, 10), -1.0), torch.full((1, 10), -2.0)
    both = batch().with_logprobs(old=old).with_logprobs(ref=ref)
    assert both.old_logprobs is old
    assert both.ref_logprobs is ref
    assert set(both.to("cpu").tensors()) - set(batch().tensors()) == {"old_logprobs", "ref_logprobs"}


def test_step_plan_refuses_ranks_with_different_numbers_of_micro_batches():
    with pytest.raises(ValueError, match=r"ranks have \[1, 2\] micro-batches"):
        StepPlan(
            micro_batches=((batch(),), (batch(), batch())), num_samples=2, num_trained_tokens=5, num_real_tokens=8,
            num_padded_tokens=2,
        )  # fmt: skip


def test_frozen():
    with pytest.raises(FrozenInstanceError):
        batch().labels = torch.zeros(1)  # pyright: ignore[reportAttributeAccessIssue] the point of the test


def test_stats_merge_as_their_reduction_says():
    cases = [
        ([Stat.mean(6, 3), Stat.mean(2, 1)], 2.0),
        ([Stat.mean(0, 0), Stat.mean(3, 1)], 3.0),  # nothing observed weighs nothing
        ([Stat.sum(2), Stat.sum(5)], 7.0),
        ([Stat.max(2), Stat.max(-5)], 2.0),
        ([Stat.min(2), Stat.min(-5)], -5.0),
        ([Stat.of_quantile(np.array([1, 2, 3]), 0.5), Stat.of_quantile(np.array([10, 11]), 0.5)], 3.0),
    ]
    for parts, expected in cases:
        for order in (parts, parts[::-1]):
            assert StepMetrics.merged([StepMetrics(stats={"x": s}) for s in order]).values() == {"x": expected}
    assert math.isnan(Stat.mean(0, 0).value())
    assert math.isnan(Stat.of_quantile(np.zeros(0), 0.5).value())


def test_a_mean_of_means_would_be_wrong():
    merged = Stat.mean(6, 3).merge(Stat.mean(10, 1)).value()
    assert merged == 4.0 != np.mean([6 / 3, 10 / 1])


def test_unlike_statistics_do_not_merge():
    with pytest.raises(ValueError, match="cannot merge"):
        Stat.sum(1).merge(Stat.max(1))
    with pytest.raises(ValueError, match="cannot merge"):
        Stat.of_quantile(np.ones(1), 0.5).merge(Stat.of_quantile(np.ones(1), 0.9))


def test_metrics_absent_from_a_part_come_from_the_others():
    merged = StepMetrics.merged([StepMetrics(stats={"a": Stat.sum(1)}), StepMetrics(stats={"b": Stat.sum(2)})])
    assert merged.values() == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    "changes",
    [
        {"missing": ("w",)},
        {"unexpected": ("w",)},
        {"unloaded": ("w",)},
        {"mismatched": ("w",)},
        {"engine_versions": (3, 2)},
        {"canary": CanaryResult(num_tokens=8, max_abs=1e-4, mean_abs=1e-7, tolerance=1e-5, seconds=0.1)},
        {"canary": CanaryResult(num_tokens=8, max_abs=float("nan"), mean_abs=0, tolerance=1e-5, seconds=0.1)},
        {"canary": CanaryResult(num_tokens=0, max_abs=0, mean_abs=0, tolerance=1e-5, seconds=0.1)},
    ],
)
def test_one_fault_spoils_a_certificate(changes: dict):
    assert certificate().ok
    assert certificate(canary=None).ok
    assert not certificate(**changes).ok


def test_shard_plan_names_tensors_whose_bits_differ():
    tensors = tuple(
        ShardedTensor(trainer_name=n, hf_name=n, shape=(2,), local_numel=(1, 1), checksum=c, source_checksum=1)
        for n, c in (("a", 1), ("b", 2))
    )
    plan = ShardPlan(
        backend="b", num_ranks=2, dtype="float32", tensors=tensors, checkpoint="c", tied_embeddings=True, barrier_s=0.0
    )
    assert plan.mismatched == ("b",)


def test_what_crosses_a_process_survives_pickling():
    group = make_group([make_rollout(0, 1.0), make_rollout(1, 0.0, finish=FinishReason.LENGTH)])
    restored: RolloutGroup = pickle.loads(pickle.dumps(group))
    assert restored.prompt == group.prompt
    assert restored.rollouts[1].verdict == group.rollouts[1].verdict
    assert restored.rollouts[1].completion.finish_reason is FinishReason.LENGTH
    np.testing.assert_array_equal(restored.rollouts[0].completion.logprobs, group.rollouts[0].completion.logprobs)

    plan = plan_step([make_sample("a", 2, 3)], num_ranks=2, pack_length=8, micro_batch_packs=1)
    restored_plan: StepPlan = pickle.loads(pickle.dumps(plan))
    for name, tensor in plan.micro_batches[0][0].tensors().items():
        assert torch.equal(tensor, restored_plan.micro_batches[0][0].tensors()[name])
    assert restored_plan.padding_share == plan.padding_share

    sample: TrainingSample = pickle.loads(pickle.dumps(make_sample("a", 2, 3)))
    assert sample.num_trained_tokens == 3
    assert pickle.loads(pickle.dumps(certificate())) == certificate()
    metrics = StepMetrics(stats={"x": Stat.of_quantile(np.ones(3), 0.9)})
    stat = pickle.loads(pickle.dumps(metrics)).stats["x"]
    assert (stat.reduction, stat.quantile, stat.value()) == (Reduction.QUANTILE, 0.9, 1.0)


def test_errors_survive_pickling():
    deadline = DeadlineExceeded(
        stage="sync", waited_for="ranks [1] of 2", deadline_s=3.0, setting="deadlines.barrier_s"
    )
    for error in (deadline, ConfigError(["a", "b"]), NonFiniteLogprobs("x")):
        restored = pickle.loads(pickle.dumps(error))
        assert type(restored) is type(error)
        assert str(restored) == str(error)
