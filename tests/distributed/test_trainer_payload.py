"""What a trainer hands to a weight sync: everything, plain, under the right names.

Functions whose name does not start with `test_` run in the ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from grpo_lib.trainers.hf_checkpoint import HfFolder
from grpo_lib.trainers.whole_model import in_buckets, shard_report
from grpo_lib.types import StateKind
from tests.distributed.gloo_ranks import RankPool
from tests.distributed.trainer_cases import (
    OLMO_CORE,
    ZERO,
    BackendCase,
    each_backend,
    each_bf16_backend,
    largest_difference,
    score,
    state_of,
    weights_of,
)


def payload(rank: int, num_ranks: int, case: BackendCase, model: Path, dtype: str) -> list[tuple[Any, ...]]:
    trainer: Any = case.build(rank, num_ranks, model, dtype=dtype)
    sent = [pair for bucket in in_buckets(trainer._gathered(), 8_000) for pair in bucket.tensors]
    for entry, (name, tensor) in zip(trainer.manifest().entries, sent, strict=True):
        assert (entry.name, entry.shape, entry.dtype) == (name, tuple(tensor.shape), dtype)
    sizes = [[tensor.nbytes for _, tensor in bucket.tensors] for bucket in in_buckets(trainer._gathered(), 8_000)]
    assert all(len(bucket) == 1 or sum(bucket) <= 8_000 for bucket in sizes)
    assert len(sizes) > 3
    return [(name, type(tensor), tensor.is_contiguous(), tensor.float().numpy()) for name, tensor in sent]


@pytest.mark.parametrize("family", ["qwen3_tied", "llama3", "olmo2"])
@each_backend
def test_payload_is_the_source_folder_bit_for_bit(
    two_ranks: RankPool, tiny_models: dict[str, Path], case: BackendCase, family: str
) -> None:
    source = load_file(tiny_models[family] / "model.safetensors")
    first, second = two_ranks.run(payload, case, tiny_models[family], "float32")
    assert {name for name, *_ in first} == source.keys()
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= source.keys()
    assert ("lm_head.weight" in source) == (family != "qwen3_tied")
    for (name, kind, is_contiguous, values), (other_name, _, _, other_values) in zip(first, second, strict=True):
        assert name == other_name
        assert kind is torch.Tensor
        assert is_contiguous
        np.testing.assert_array_equal(values, source[name].numpy())
        np.testing.assert_array_equal(values, other_values)


@each_bf16_backend
def test_bf16_payload_is_the_rounded_source(
    two_ranks: RankPool, tiny_models: dict[str, Path], case: BackendCase
) -> None:
    source = load_file(tiny_models["qwen3"] / "model.safetensors")
    for name, _, _, values in two_ranks.run(payload, case, tiny_models["qwen3"], "bfloat16")[0]:
        np.testing.assert_array_equal(values, source[name].bfloat16().float().numpy())


def payload_with_the_root_left_sharded(rank: int, num_ranks: int, model: Path) -> tuple[str, bool]:
    trainer: Any = OLMO_CORE.build(rank, num_ranks, model)
    before = weights_of(trainer)
    trainer._weights.root.unshard = lambda: None  # what a per-block gather does
    try:
        weights_of(trainer)
    except AssertionError as error:
        message = str(error)
    else:
        message = "sent"
    del trainer._weights.root.unshard
    return message, largest_difference(weights_of(trainer), before) == 0


def test_a_root_parameter_that_was_not_gathered_is_never_sent(
    two_ranks: RankPool, tiny_models: dict[str, Path]
) -> None:
    for message, is_intact_afterwards in two_ranks.run(payload_with_the_root_left_sharded, tiny_models["qwen3_tied"]):
        assert "model.embed_tokens" in message or "embeddings.weight is still sharded" in message
        assert is_intact_afterwards


def build_without_the_root_unit(rank: int, num_ranks: int, model: Path) -> str:
    from grpo_lib.trainers import olmo_core_weights

    original = olmo_core_weights._owned
    olmo_core_weights._owned = lambda model: dict(list(original(model).items())[1:])
    try:
        OLMO_CORE.build(rank, num_ranks, model)
    except AssertionError as error:
        return str(error)
    finally:
        olmo_core_weights._owned = original
    return "built"


def test_leaving_a_unit_out_of_the_manifest_fails_at_construction(
    two_ranks: RankPool, tiny_models: dict[str, Path]
) -> None:
    for message in two_ranks.run(build_without_the_root_unit, tiny_models["qwen3_tied"]):
        assert "model.embed_tokens.weight" in message


def abandon_the_payload(rank: int, num_ranks: int, case: BackendCase, model: Path) -> float:
    trainer: Any = case.build(rank, num_ranks, model)
    before = score(trainer)
    next(in_buckets(trainer._gathered(), 8_000))  # a sender that fails after the first bucket
    return largest_difference(score(trainer), before)


@each_backend
def test_an_abandoned_payload_leaves_the_trainer_usable(
    two_ranks: RankPool, tiny_models: dict[str, Path], case: BackendCase
) -> None:
    assert two_ranks.run(abandon_the_payload, case, tiny_models["qwen3"]) == [0.0, 0.0]


def shard_reports(rank: int, num_ranks: int, case: BackendCase, model: Path) -> tuple[Any, Any]:
    trainer: Any = case.build(rank, num_ranks, model)
    source = HfFolder(model)
    intact = shard_report(trainer, source, dtype="float32")
    weights = state_of(trainer, StateKind.WEIGHT)
    weights["model.norm.weight"][-1] += 2.0**-20
    trainer.load_state(StateKind.WEIGHT, lambda name: torch.from_numpy(weights[name]))
    return intact, shard_report(trainer, source, dtype="float32")


@each_backend
def test_shard_report_shows_the_layout_and_any_changed_bit(
    two_ranks: RankPool, tiny_models: dict[str, Path], case: BackendCase
) -> None:
    copies = 2 if case is ZERO[0] else 1  # stage 0 shards nothing
    for intact, changed in two_ranks.run(shard_reports, case, tiny_models["qwen3_tied"]):
        assert all(tensor.checksum == tensor.source_checksum for tensor in intact)
        for tensor in intact:
            assert len(tensor.local_numel) == 2
            assert sum(tensor.local_numel) == copies * np.prod(tensor.shape)
        assert [t.hf_name for t in changed if t.checksum != t.source_checksum] == ["model.norm.weight"]
