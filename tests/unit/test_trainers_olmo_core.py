"""The parts of the OLMo-core trainer that need no ranks: names, configs, attention, learning rates."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from olmo_core.nn.attention.backend import TorchAttentionBackend
from olmo_core.nn.hf.convert import convert_state_to_hf
from torch.nn.functional import scaled_dot_product_attention

from grpo_lib.config import TrainerConfig
from grpo_lib.errors import ConfigError, DataError, GrpoError
from grpo_lib.trainers.joined_documents import JoinedDocuments
from grpo_lib.trainers.olmo_core_attention import (
    BucketCache,
    DocumentAttention,
    DocumentBuckets,
    use_document_attention,
)
from grpo_lib.trainers.olmo_core_model import NameMap, transformer_config
from grpo_lib.trainers.olmo_core_optim import SteppedAdamW
from grpo_lib.trainers.olmo_core_weights import shard_rows

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def hf_config(model_type: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": model_type, **SIZES, **changes}


# --- Names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["llama", "olmo2", "qwen3"])
def test_names_agree_with_olmo_cores_own_converter(model_type: str) -> None:
    """Its converter lets unknown names through, so it is a witness here, not the map."""
    names = NameMap(hf_config(model_type))
    state = {name: torch.tensor([index]) for index, name in enumerate(names.trainer_names)}
    witness = convert_state_to_hf(SimpleNamespace(**hf_config(model_type), tie_word_embeddings=False), dict(state))  # pyright: ignore[reportArgumentType] only read for sizes
    assert {names.hf(name): int(value) for name, value in state.items()} == {k: int(v) for k, v in witness.items()}
    assert [names.trainer(names.hf(name)) for name in names.trainer_names] == list(names.trainer_names)


def test_wrappers_are_stripped_and_unknown_names_raise() -> None:
    names = NameMap(hf_config("qwen3", tie_word_embeddings=True))
    wrapped = "blocks.1._checkpoint_wrapped_module.attention._orig_mod.w_q.weight"
    assert names.hf(wrapped) == "model.layers.1.self_attn.q_proj.weight"
    for unknown in ("blocks.9.attention.w_q.weight", "blocks.0.attention.w_q.bias", "module.embeddings.weight"):
        with pytest.raises(DataError, match=f"{unknown}' has no Hugging Face name"):
            names.hf(unknown)
    with pytest.raises(DataError, match=r"'lm_head\.weight' is no tensor"):
        names.trainer("lm_head.weight")  # tied: the head is the embedding and has no name of its own


# --- Configs ------------------------------------------------------------------------------------------------------


def test_rope_keys_from_before_transformers_5() -> None:
    old_rope = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    old = hf_config("llama", rope_theta=LLAMA3_ROPE["rope_theta"], rope_scaling=old_rope)
    assert transformer_config(old) == transformer_config(hf_config("llama", rope_parameters=LLAMA3_ROPE))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported .* llama, olmo2, qwen3"),
        ({"attention_bias": True}, r"attention_bias \(True\) is not supported"),
        ({"hidden_act": "gelu"}, r"hidden_act \('gelu'\)"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types must all be 'full_attention'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rotary embedding .*yarn.* is not supported"),
        ({"hidden_size": None}, r"hidden_size \(None\) must be an integer"),
    ],
)
def test_unsupported_models_are_refused_by_setting(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        transformer_config({**hf_config("qwen3"), **change})


@pytest.mark.parametrize(("num_rows", "num_shards"), [(264, 2), (5, 2), (7, 4), (3, 8)])
def test_shard_rows_are_torch_chunk(num_rows: int, num_shards: int) -> None:
    rows = torch.arange(num_rows)
    shards = [rows[slice(*shard_rows(num_rows, num_shards, shard))] for shard in range(num_shards)]
    chunks = list(rows.chunk(num_shards)) + [rows[:0]] * (num_shards - len(rows.chunk(num_shards)))
    assert all(torch.equal(shard, chunk) for shard, chunk in zip(shards, chunks, strict=True))


# --- Attention ----------------------------------------------------------------------------------------------------


def test_rows_join_to_their_documents_without_padding() -> None:
    doc_ids = torch.tensor([[1, 1, 1, 2, 2, 0], [1, 2, 3, 3, 3, 3], [0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 3]])
    documents = JoinedDocuments.of(doc_ids, positions)
    assert documents.lens.tolist() == [[3, 2, 1, 1, 4, 2]]
    assert torch.equal(documents.is_kept, doc_ids > 0)


def test_a_micro_batch_of_padding_keeps_one_token() -> None:
    documents = JoinedDocuments.of(torch.zeros(2, 3, dtype=torch.int64), torch.arange(3).expand(2, -1))
    assert documents.lens.tolist() == [[1]]
    assert documents.is_kept.tolist() == [[True, False, False], [False, False, False]]


def test_positions_that_run_on_over_a_boundary_are_refused() -> None:
    doc_ids = torch.tensor([[1, 1, 0, 0], [1, 1, 2, 2]])
    with pytest.raises(ValueError, match="row 1: position_ids do not restart"):
        JoinedDocuments.of(doc_ids, torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]]))


def test_buckets_of_the_docstring() -> None:
    documents = DocumentBuckets.of(torch.tensor([0, 2, 7, 9], dtype=torch.int32))
    assert [bucket.tolist() for bucket in documents.buckets] == [[[0, 1], [7, 8]], [[2, 3, 4, 5, 6]]]
    assert documents.restore.tolist() == [0, 1, 4, 5, 6, 7, 8, 2, 3]


def test_a_short_document_repeats_its_last_token() -> None:
    documents = DocumentBuckets.of(torch.tensor([0, 3, 7]))
    assert [bucket.tolist() for bucket in documents.buckets] == [[[0, 1, 2, 2], [3, 4, 5, 6]]]
    assert documents.restore.tolist() == [0, 1, 2, 4, 5, 6, 7]


def attention(n_heads: int, n_kv_heads: int, **options: Any) -> DocumentAttention:
    replaced = TorchAttentionBackend(head_dim=8, n_heads=n_heads, n_kv_heads=n_kv_heads, **options)
    return DocumentAttention(replaced, BucketCache())


@pytest.mark.parametrize("n_kv_heads", [4, 2])
def test_attention_and_its_gradients_equal_a_block_diagonal_mask(n_kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(3)
    lens = torch.tensor([[5, 1, 9, 1], [2, 14, 0, 0], [3, 4, 4, 5]])
    q, k, v = (
        torch.randn(3, 16, heads, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (4, n_kv_heads, n_kv_heads)
    )
    doc = torch.stack([torch.repeat_interleave(torch.arange(4), row) for row in lens])
    mask = ((doc[:, :, None] == doc[:, None, :]) & torch.ones(16, 16, dtype=torch.bool).tril())[:, None]
    repeats = 4 // n_kv_heads
    expected = scaled_dot_product_attention(
        q.transpose(1, 2),
        k.repeat_interleave(repeats, 2).transpose(1, 2),
        v.repeat_interleave(repeats, 2).transpose(1, 2),
        attn_mask=mask,
    ).transpose(1, 2)
    bounds = torch.cat([torch.zeros(1, dtype=torch.int32), lens[lens > 0].cumsum(0, dtype=torch.int32)])
    actual = attention(4, n_kv_heads)((q, k, v), cu_doc_lens=bounds, max_doc_len=14)
    upstream = torch.randn(actual.shape, generator=generator, dtype=torch.float64)
    for got, want in zip(
        (actual, *torch.autograd.grad(actual, (q, k, v), upstream)),
        (expected, *torch.autograd.grad(expected, (q, k, v), upstream)),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_new_boundaries_are_not_answered_from_the_cache() -> None:
    cache = BucketCache()
    first, second = torch.tensor([0, 2, 4]), torch.tensor([0, 1, 4])
    assert cache.get(first) is cache.get(first)
    assert cache.get(second) is not cache.get(first)


def test_attention_without_boundaries_is_an_error() -> None:
    """OLMo-core passes none when `max_doc_lens` is missing, without a word."""
    qkv = torch.zeros(3, 1, 4, 2, 8).unbind(0)
    with pytest.raises(GrpoError, match="without document boundaries"):
        attention(2, 2)(qkv)


def test_a_sliding_window_is_refused() -> None:
    with pytest.raises(GrpoError, match="has no sliding window"):
        attention(2, 2, window_size=(3, 0))


def test_a_block_that_cannot_honour_boundaries_is_named() -> None:
    model = transformer_config(hf_config("llama")).build(init_device="meta")
    use_document_attention(model)
    kinds = {type(module) for module in model.modules() if isinstance(module, TorchAttentionBackend)}
    assert kinds == {DocumentAttention}
    setattr(model.blocks["1"], "attention", torch.nn.Identity())  # noqa: B010 a recurrent mixer, say
    with pytest.raises(GrpoError, match="block 1: Identity cannot keep attention inside documents"):
        use_document_attention(model)


# --- Learning rate ------------------------------------------------------------------------------------------------


def rates(schedule: str, warmup: int, total_steps: int) -> list[float]:
    config = TrainerConfig.model_construct(
        **{**TrainerConfig().model_dump(), "learning_rate": 8.0, "lr_scheduler": schedule, "warmup_steps": warmup}
    )
    optimizer = SteppedAdamW(torch.nn.Linear(1, 1), config, total_steps=total_steps)  # pyright: ignore[reportArgumentType] any module has parameters
    return [optimizer.learning_rate(step) for step in range(total_steps)]


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 0, [8, 8, 8, 8]),
        ("constant", 2, [4, 8, 8, 8]),
        ("linear", 0, [8, 6, 4, 2]),
        ("linear", 2, [4, 8, 8, 4]),
        ("cosine", 0, [8, 4 + 8**0.5, 4, 4 - 8**0.5]),
        ("cosine", 2, [4, 8, 8, 4]),
    ],
)
def test_schedules_by_hand(schedule: str, warmup: int, expected: list[float]) -> None:
    """The first step learns, the warm-up reaches the peak, and a decay reaches 0 only after the last step."""
    assert rates(schedule, warmup, 4) == pytest.approx(expected, rel=1e-12)


def test_an_unknown_schedule_raises() -> None:
    with pytest.raises(ConfigError, match="must be constant, linear or cosine"):
        rates("polynomial", 0, 4)
