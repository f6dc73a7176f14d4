"""What is packed for the trip unpickles as what was put in, and may be written to."""

from __future__ import annotations

import pickle
from dataclasses import fields

import numpy as np
import torch

from grpo_lib.ray_runtime.parcels import BatchParcel, CompletionParcel
from grpo_lib.types import Completion, FinishReason, PackedBatch, VersionSpan


def batch(seed: int, *, reference: bool) -> PackedBatch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 50, (2, 6), generator=generator)
    noise = torch.randn(2, 6, generator=generator)
    return PackedBatch(
        input_ids=ids, labels=ids + 1, position_ids=ids % 3, doc_ids=ids % 2, response_mask=ids % 2 == 0,
        advantages=noise, rollout_logprobs=-noise.abs(), ref_logprobs=noise * 2 if reference else None,
        sample_ids=((f"e0.p{seed}/0",), (f"e0.p{seed}/1", "e0.q/0")),
    )  # fmt: skip


def test_batches_arrive_as_they_were() -> None:
    for reference in (False, True):
        sent = [batch(seed, reference=reference) for seed in range(3)]
        received = pickle.loads(pickle.dumps(BatchParcel(sent)))
        assert isinstance(received, tuple)
        for before, after in zip(sent, received, strict=True):
            assert before.sample_ids == after.sample_ids
            assert before.tensors().keys() == after.tensors().keys()
            for name, tensor in before.tensors().items():
                assert torch.equal(tensor, after.tensors()[name])
                assert tensor.dtype == after.tensors()[name].dtype
        received[0].advantages.add_(1.0)
        assert torch.equal(received[1].advantages, sent[1].advantages)
    assert pickle.loads(pickle.dumps(BatchParcel([]))) == ()


def completion(key: str, lengths: tuple[int, ...], reason: FinishReason) -> Completion:
    stops = np.cumsum(lengths).tolist()
    count = sum(lengths)
    return Completion(
        request_id=key,
        token_ids=np.arange(count) * 7,
        logprobs=-np.arange(count, dtype=np.float32) / 3,
        version_spans=tuple(
            VersionSpan(version=4 + i, start=stop - length, stop=stop)
            for i, (stop, length) in enumerate(zip(stops, lengths, strict=True))
        ),
        finish_reason=reason,
        seed=2**62 + count,
        latency_s=0.1 * count,
    )


def test_completions_arrive_as_they_were() -> None:
    sent = [
        completion("a", (3,), FinishReason.STOP),
        completion("nothing", (), FinishReason.ABORT),
        completion("c", (2, 5, 1), FinishReason.LENGTH),
    ]
    received = pickle.loads(pickle.dumps(CompletionParcel(sent)))
    assert isinstance(received, list)
    for before, after in zip(sent, received, strict=True):
        for field in fields(Completion):
            expected, value = getattr(before, field.name), getattr(after, field.name)
            if isinstance(expected, np.ndarray):
                np.testing.assert_array_equal(value, expected)
                assert value.dtype == expected.dtype
            else:
                assert value == expected
                assert type(value) is type(expected)
    assert pickle.loads(pickle.dumps(CompletionParcel([]))) == []
