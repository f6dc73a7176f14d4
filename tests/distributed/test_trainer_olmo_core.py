"""What only the OLMo-core trainer can get wrong: document boundaries, families, ties, and failing together.

Functions whose name does not start with `test_` run in the ranks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_lib.algo.packing import pack, unpack_tokens
from grpo_lib.errors import GrpoError, NonFiniteGradient, NonFiniteLogprobs
from tests.distributed.gloo_ranks import RankPool
from tests.distributed.trainer_cases import (
    CONFIG,
    PACK_LENGTH,
    PLAN,
    build_olmo_core,
    hf_scores,
    largest_difference,
    olmo_core_gradients,
    policy_loss,
    samples,
    score,
    train,
    weights_of,
)

# --- Documents stay apart -----------------------------------------------------------------------------------------


def build_with_broken_boundaries(rank: int, num_ranks: int, model: Path, how: str) -> str:
    from olmo_core.nn.attention.backend import TorchAttentionBackend

    from grpo_lib.trainers.olmo_core_attention import DocumentAttention, JoinedDocuments

    original_of, original_forward = JoinedDocuments.of, DocumentAttention.forward

    def as_one_document(doc_ids: torch.Tensor, position_ids: torch.Tensor) -> JoinedDocuments:
        documents = original_of(doc_ids, position_ids)
        return JoinedDocuments(is_kept=documents.is_kept, lens=documents.lens.sum()[None, None])

    def without_the_first(doc_ids: torch.Tensor, position_ids: torch.Tensor) -> JoinedDocuments:
        documents = original_of(doc_ids, position_ids)
        return JoinedDocuments(is_kept=documents.is_kept, lens=documents.lens[:, -1:])

    def leaking(self: Any, qkv: Any, cu_doc_lens: Any = None, max_doc_len: Any = None, **options: Any) -> Any:
        return TorchAttentionBackend.forward(self, qkv, **options)

    if how == "one document per row":
        setattr(JoinedDocuments, "of", staticmethod(as_one_document))  # noqa: B010 sabotage
    elif how == "a length left out":
        setattr(JoinedDocuments, "of", staticmethod(without_the_first))  # noqa: B010 sabotage
    else:
        setattr(DocumentAttention, "forward", leaking)  # noqa: B010 sabotage
    try:
        build_olmo_core(rank, num_ranks, model)
    except (GrpoError, RuntimeError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        setattr(JoinedDocuments, "of", staticmethod(original_of))  # noqa: B010
        setattr(DocumentAttention, "forward", original_forward)  # noqa: B010
    return "built"


@pytest.mark.parametrize("how", ["one document per row", "a length left out", "attention ignores the boundaries"])
def test_lost_boundaries_fail_at_construction(one_rank: RankPool, tiny_models: dict[str, Path], how: str) -> None:
    (message,) = one_rank.run(build_with_broken_boundaries, tiny_models["qwen3"], how)
    assert message != "built"
    if how != "a length left out":
        assert "cross document boundaries" in message


def score_permuted(rank: int, num_ranks: int, model: Path) -> tuple[float, float, str]:
    trainer = build_olmo_core(rank, num_ranks, model)
    scores = score(trainer)
    backwards = pack(samples()[::-1], PACK_LENGTH)
    permuted = unpack_tokens(backwards, trainer.logprobs(backwards))
    joined = pack([samples()[0], samples()[2]], PACK_LENGTH)
    split = samples()[0].input_ids.size
    as_one = torch.where(joined.doc_ids > 0, 1, 0)
    positions = torch.cat([torch.arange(int(n)) for n in torch.unique_consecutive(as_one, return_counts=True)[1]])[None]
    leaked = trainer._score(joined.input_ids, joined.labels, as_one, positions)[0, split : split + 8]
    apart = trainer.logprobs(joined)[0, split : split + 8]
    try:
        trainer._score(joined.input_ids, joined.labels, joined.doc_ids, positions)
    except ValueError as error:
        message = str(error)
    else:
        message = "scored"
    return largest_difference(scores, permuted), float((leaked - apart).abs().max()), message


def test_order_in_the_pack_changes_nothing_and_boundaries_change_much(
    one_rank: RankPool, tiny_models: dict[str, Path]
) -> None:
    """One run, three facts: the second is what makes the first mean something."""
    ((permuted, leaked, message),) = one_rank.run(score_permuted, tiny_models["qwen3"])
    assert permuted <= 1e-5
    assert leaked > 0.1
    assert "row 0: position_ids do not restart" in message


def gradient_of_unused_tokens(rank: int, num_ranks: int, model: Path) -> np.ndarray:
    trainer = build_olmo_core(rank, num_ranks, model)
    trainer.forward_backward(PLAN.micro_batches[rank], policy_loss(), loss_denominator=10.0)
    return olmo_core_gradients(trainer)["model.embed_tokens.weight"]


def test_padding_has_exactly_zero_gradient(two_ranks: RankPool, tiny_models: dict[str, Path]) -> None:
    used = {int(token) for sample in samples() for token in sample.input_ids}
    assert 0 not in used, "id 0 must be padding only"
    gradient = two_ranks.run(gradient_of_unused_tokens, tiny_models["qwen3"])[0]
    assert np.all(gradient[0] == 0)
    assert np.abs(gradient[sorted(used)]).max() > 0


# --- Families, dtypes, ties ---------------------------------------------------------------------------------------


def score_in(rank: int, num_ranks: int, model: Path, dtype: str) -> dict[str, np.ndarray]:
    return score(build_olmo_core(rank, num_ranks, model, dtype=dtype))


@pytest.mark.parametrize("family", ["qwen3_tied", "qwen3", "llama", "llama3", "olmo2"])
def test_families_equal_hugging_face(one_rank: RankPool, tiny_models: dict[str, Path], family: str) -> None:
    """Packed here, document by document there; 0.0 was measured for every family in both dtypes."""
    for dtype, tolerance in (("float32", 2e-6), ("bfloat16", 5e-3)):
        (scores,) = one_rank.run(score_in, tiny_models[family], dtype)
        assert largest_difference(scores, hf_scores(tiny_models[family], getattr(torch, dtype))) <= tolerance, dtype


@pytest.mark.parametrize("model_type", ["llama", "olmo2", "qwen3"])
def test_left_out_config_keys_mean_what_they_mean_to_transformers(model_type: str) -> None:
    from transformers import AutoConfig

    from grpo_lib.trainers.olmo_core_model import transformer_config

    sizes = {"hidden_size": 256, "vocab_size": 64, "num_hidden_layers": 1, "intermediate_size": 32}
    full = AutoConfig.for_model(model_type, **sizes, num_attention_heads=4, num_key_value_heads=4).to_dict()
    short = {"model_type": model_type, **sizes, "num_attention_heads": 4}
    assert transformer_config(short) == transformer_config(full)


def score_with_another_rounding(rank: int, num_ranks: int, model: Path, part: str) -> dict[str, np.ndarray]:
    from olmo_core.nn.layer_norm import LayerNormType

    from grpo_lib.trainers import olmo_core_model

    original = olmo_core_model._FAMILIES
    other: dict[str, Any] = {"layer_norm": LayerNormType.rms} if part == "norm" else {"rope_full_precision": True}
    olmo_core_model._FAMILIES = {name: replace(family, **other) for name, family in original.items()}
    try:
        return score_in(rank, num_ranks, model, "bfloat16")
    finally:
        olmo_core_model._FAMILIES = original


@pytest.mark.parametrize("part", ["norm", "rotary embedding"])
def test_the_comparison_notices_another_rounding_order(
    one_rank: RankPool, tiny_models: dict[str, Path], part: str
) -> None:
    (scores,) = one_rank.run(score_with_another_rounding, tiny_models["llama"], part)
    assert largest_difference(scores, hf_scores(tiny_models["llama"], torch.bfloat16)) > 1e-2


def train_in_bf16(rank: int, num_ranks: int, model: Path) -> tuple[set[str], list[float], float]:
    config = CONFIG.model_copy(update={"learning_rate": 1e-6, "warmup_steps": 0, "lr_scheduler": "constant"})
    trainer = build_olmo_core(rank, num_ranks, model, dtype="bfloat16", config=config)
    before = weights_of(trainer)
    steps = train(trainer, rank, PLAN, 2)
    dtypes = {str(p.dtype) for p in trainer._model.parameters()}
    dtypes |= {str(s["exp_avg"].dtype) for s in trainer._optimizer.adamw.state.values()}
    return dtypes, [step["optim/update_rms"] for step in steps], largest_difference(weights_of(trainer), before)


def test_bf16_keeps_fp32_master_weights_that_a_small_learning_rate_moves(
    two_ranks: RankPool, tiny_models: dict[str, Path]
) -> None:
    """At 1e-6 an update is far below bf16's spacing: it must not be lost, and the engine may not see it yet."""
    for dtypes, update_rms, visible in two_ranks.run(train_in_bf16, tiny_models["qwen3_tied"]):
        assert dtypes == {"torch.float32"}
        assert all(0 < rms < 1e-6 for rms in update_rms)
        assert visible < 1e-2


def train_tied(rank: int, num_ranks: int, model: Path) -> tuple[bool, int, dict[str, np.ndarray]]:
    trainer = build_olmo_core(rank, num_ranks, model)
    train(trainer, rank, PLAN, 3)
    is_tied = trainer._model.lm_head.w_out.weight is trainer._model.embeddings.weight
    matrices = sum(p.shape == trainer._model.embeddings.weight.shape for p in trainer._optimizer._parameters)
    return is_tied, matrices, weights_of(trainer)


def test_tied_embeddings_stay_tied(two_ranks: RankPool, tiny_models: dict[str, Path]) -> None:
    for is_tied, num_matrices, weights in two_ranks.run(train_tied, tiny_models["qwen3_tied"]):
        assert is_tied
        assert num_matrices == 1
        assert "lm_head.weight" not in weights


def use_frozen(rank: int, num_ranks: int, model: Path) -> tuple[bool, bool, dict[str, np.ndarray], float]:
    policy = build_olmo_core(rank, num_ranks, model)
    frozen = build_olmo_core(rank, num_ranks, model, trainable=False)
    scores = score(frozen)
    train(policy, rank, PLAN, 1)
    drift = largest_difference(score(frozen), scores)
    return any(p.requires_grad for p in frozen._model.parameters()), frozen._optimizer is None, scores, drift


def test_a_frozen_reference_scores_beside_the_policy_and_stays(
    two_ranks: RankPool, tiny_models: dict[str, Path]
) -> None:
    expected = hf_scores(tiny_models["llama"], torch.float32)
    for needs_gradients, has_no_optimiser, scores, drift in two_ranks.run(use_frozen, tiny_models["llama"]):
        assert not needs_gradients
        assert has_no_optimiser
        assert largest_difference(scores, expected) <= 2e-6
        assert drift == 0


def train_without_effect(rank: int, num_ranks: int, model: Path) -> tuple[list[dict[str, float]], int]:
    config = CONFIG.model_copy(update={"learning_rate": 1e-30, "warmup_steps": 0})
    trainer = build_olmo_core(rank, num_ranks, model, config=config)
    return train(trainer, rank, PLAN, 1), trainer.policy_version


def test_a_step_that_moves_no_weight_says_so(two_ranks: RankPool, tiny_models: dict[str, Path]) -> None:
    """The optimiser runs and the version advances; only comparing the weights shows that nothing was learned."""
    for steps, version in two_ranks.run(train_without_effect, tiny_models["qwen3"]):
        assert version == 1
        assert steps[0]["optim/grad_norm"] > 0
        assert (steps[0]["optim/weights_moved"], steps[0]["optim/update_rms"]) == (0.0, 0.0)


# --- Failures -----------------------------------------------------------------------------------------------------


def poison_one_token(rank: int, num_ranks: int, model: Path, token: int) -> tuple[str, bool]:
    trainer = build_olmo_core(rank, num_ranks, model)
    embeddings = trainer._model.embeddings.weight
    first_row = rank * embeddings.to_local().shape[0]
    if first_row <= token < first_row + embeddings.to_local().shape[0]:
        with torch.no_grad():
            embeddings.to_local()[token - first_row] = torch.nan
    try:
        train(trainer, rank, PLAN, 1)
    except NonFiniteLogprobs as error:
        return str(error), all(p.grad is None for p in trainer._model.parameters())
    return "trained", False


def test_nan_on_one_rank_stops_every_rank_and_names_the_sample(
    two_ranks: RankPool, tiny_models: dict[str, Path]
) -> None:
    """Only rank 1's rows use the poisoned token; rank 0 would otherwise wait in the next collective."""
    ids_of = [
        {int(t) for batch in batches for t in batch.input_ids[batch.doc_ids > 0]} for batches in PLAN.micro_batches
    ]
    token = next(
        int(s.input_ids[0])
        for s in samples()
        if int(s.input_ids[0]) in ids_of[1] and int(s.input_ids[0]) not in ids_of[0]
    )
    named = [s.sample_id for s in samples() if token in s.input_ids]
    messages = two_ranks.run(poison_one_token, tiny_models["qwen3"], token)
    assert messages[0] == messages[1]
    message, gradients_are_dropped = messages[0]
    assert message.startswith("rank 1: ")
    assert any(sample_id in message for sample_id in named)
    assert gradients_are_dropped


def overflow_a_gradient(rank: int, num_ranks: int, model: Path) -> tuple[str, float, int, bool]:
    trainer = build_olmo_core(rank, num_ranks, model)
    before = weights_of(trainer)
    trainer.forward_backward(PLAN.micro_batches[rank], policy_loss(), loss_denominator=10.0)
    if rank == 1:
        trainer._model.lm_head.norm.weight.grad.to_local()[0] = torch.inf
    try:
        trainer.optim_step()
    except NonFiniteGradient as error:
        counts = {float(state["step"]) for state in trainer._optimizer.adamw.state.values()}
        return str(error), largest_difference(weights_of(trainer), before), trainer.policy_version, counts == {0.0}
    return "applied", 0.0, -1, False


def test_a_non_finite_gradient_is_not_applied(two_ranks: RankPool, tiny_models: dict[str, Path]) -> None:
    for message, change, version, optimiser_is_untouched in two_ranks.run(overflow_a_gradient, tiny_models["qwen3"]):
        assert "gradient norm is inf" in message
        assert (change, version, optimiser_is_untouched) == (0.0, 0, True)


def score_between_backward_and_step(rank: int, num_ranks: int, model: Path, between: bool) -> dict[str, np.ndarray]:
    trainer = build_olmo_core(rank, num_ranks, model)
    trainer.forward_backward(PLAN.micro_batches[rank], policy_loss(), loss_denominator=10.0)
    if between:
        score(trainer)
    trainer.optim_step()
    return score(trainer)


def test_scoring_leaves_no_stale_weights_behind(two_ranks: RankPool, tiny_models: dict[str, Path]) -> None:
    """OLMo-core keeps an untied head gathered after its forward; the next step would not reach that copy."""
    plain = two_ranks.run(score_between_backward_and_step, tiny_models["qwen3"], False)
    between = two_ranks.run(score_between_backward_and_step, tiny_models["qwen3"], True)
    assert [largest_difference(a, b) for a, b in zip(plain, between, strict=True)] == [0.0, 0.0]


def build_with_wrong_rank_count(rank: int, num_ranks: int, model: Path) -> str:
    try:
        build_olmo_core(rank, num_ranks + 1, model)
    except ValueError as error:
        return str(error)
    return "built"


def test_a_process_group_of_another_size_is_refused(two_ranks: RankPool, tiny_models: dict[str, Path]) -> None:
    messages = two_ranks.run(build_with_wrong_rank_count, tiny_models["qwen3"])
    assert "trainer rank 1 of 3 needs a process group to match, found rank 1 of 2" in messages[1]
