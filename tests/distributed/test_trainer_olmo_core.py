"""What only the OLMo-core trainer can get wrong: FSDP payloads, document boundaries, ties, checkpoints, failures.

Functions whose name does not start with `test_` run in the ranks.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from grpo_lib.algo.packing import pack, plan_step, unpack_tokens
from grpo_lib.errors import DataError, GrpoError, NonFiniteGradient, NonFiniteLogprobs
from grpo_lib.types import StepPlan
from tests.distributed.gloo_ranks import RankPool
from tests.distributed.trainer_cases import (
    CONFIG,
    PACK_LENGTH,
    TEMPERATURE,
    build_olmo_core,
    olmo_core_gradients,
    policy_loss,
    samples,
    weights_of,
)

PLAN = plan_step(samples(), num_ranks=2, pack_length=PACK_LENGTH, micro_batch_packs=1)
ONE_RANK_PLAN = plan_step(samples(), num_ranks=1, pack_length=PACK_LENGTH, micro_batch_packs=2)


def train(trainer: Any, rank: int, plan: StepPlan, num_steps: int) -> list[dict[str, float]]:
    steps = []
    for _ in range(num_steps):
        trainer.forward_backward(
            plan.micro_batches[rank], policy_loss(), loss_denominator=float(plan.num_trained_tokens)
        )
        steps.append(trainer.optim_step().values())
    return steps


def score(trainer: Any) -> dict[str, np.ndarray]:
    batch = pack(samples(), PACK_LENGTH)
    return unpack_tokens(batch, trainer.logprobs(batch))


def largest_difference(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    assert a.keys() == b.keys()
    return max(float(np.abs(a[name] - b[name]).max()) for name in a)


# --- The payload of a weight sync ---------------------------------------------------------------------------------


def payload(rank: int, num_ranks: int, model: Path, dtype: str) -> list[tuple[Any, ...]]:
    trainer = build_olmo_core(rank, num_ranks, model, dtype=dtype)
    sent = [pair for bucket in trainer._buckets(8_000) for pair in bucket.tensors]
    for entry, (name, tensor) in zip(trainer.manifest().entries, sent, strict=True):
        assert (entry.name, entry.shape, entry.dtype) == (name, tuple(tensor.shape), dtype)
    sizes = [[tensor.nbytes for _, tensor in bucket.tensors] for bucket in trainer._buckets(8_000)]
    assert all(len(bucket) == 1 or sum(bucket) <= 8_000 for bucket in sizes)
    assert len(sizes) > 3
    return [(name, type(tensor), tensor.is_contiguous(), tensor.float().numpy()) for name, tensor in sent]


@pytest.mark.parametrize("family", ["qwen3_tied", "qwen3", "llama3", "olmo2"])
def test_payload_is_the_source_folder_bit_for_bit(
    two_ranks: RankPool, tiny_models: dict[str, Path], family: str
) -> None:
    source = load_file(tiny_models[family] / "model.safetensors")
    first, second = two_ranks.run(payload, tiny_models[family], "float32")
    assert {name for name, *_ in first} == source.keys()
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= source.keys()
    assert ("lm_head.weight" in source) == (family != "qwen3_tied")
    for (name, kind, is_contiguous, values), (other_name, _, _, other_values) in zip(first, second, strict=True):
        assert name == other_name
        assert kind is torch.Tensor
        assert is_contiguous
        np.testing.assert_array_equal(values, source[name].numpy())
        np.testing.assert_array_equal(values, other_values)


def test_bf16_payload_is_the_rounded_source(two_ranks: RankPool, tiny_models: dict[str, Path]) -> None:
    source = load_file(tiny_models["qwen3"] / "model.safetensors")
    for name, _, _, values in two_ranks.run(payload, tiny_models["qwen3"], "bfloat16")[0]:
        np.testing.assert_array_equal(values, source[name].bfloat16().float().numpy())


def payload_with_the_root_left_sharded(rank: int, num_ranks: int, model: Path) -> tuple[str, bool]:
    trainer = build_olmo_core(rank, num_ranks, model)
    before = weights_of(trainer)
    trainer._root.unshard = lambda: None  # what a per-block gather does
    try:
        weights_of(trainer)
    except AssertionError as error:
        message = str(error)
    else:
        message = "sent"
    del trainer._root.unshard
    return message, largest_difference(weights_of(trainer), before) == 0


def test_a_root_parameter_that_was_not_gathered_is_never_sent(
    two_ranks: RankPool, tiny_models: dict[str, Path]
) -> None:
    for message, is_intact_afterwards in two_ranks.run(payload_with_the_root_left_sharded, tiny_models["qwen3_tied"]):
        assert "model.embed_tokens" in message or "embeddings.weight is still sharded" in message
        assert is_intact_afterwards


def build_without_the_root_unit(rank: int, num_ranks: int, model: Path) -> str:
    from grpo_lib.trainers import olmo_core

    original = olmo_core._units
    olmo_core._units = lambda sharded: original(sharded)[1:]
    try:
        build_olmo_core(rank, num_ranks, model)
    except AssertionError as error:
        return str(error)
    finally:
        olmo_core._units = original
    return "built"


def test_leaving_a_unit_out_of_the_manifest_fails_at_construction(
    two_ranks: RankPool, tiny_models: dict[str, Path]
) -> None:
    for message in two_ranks.run(build_without_the_root_unit, tiny_models["qwen3_tied"]):
        assert "model.embed_tokens.weight" in message


def abandon_the_payload(rank: int, num_ranks: int, model: Path) -> float:
    trainer = build_olmo_core(rank, num_ranks, model)
    before = score(trainer)
    next(trainer._buckets(8_000))  # a sender that fails after the first bucket
    return largest_difference(score(trainer), before)


def test_an_abandoned_payload_leaves_the_trainer_usable(two_ranks: RankPool, tiny_models: dict[str, Path]) -> None:
    assert two_ranks.run(abandon_the_payload, tiny_models["qwen3"]) == [0.0, 0.0]


def shard_reports(rank: int, num_ranks: int, model: Path) -> tuple[Any, Any]:
    trainer = build_olmo_core(rank, num_ranks, model)
    intact = trainer.shard_report()
    with torch.no_grad():
        trainer._model.lm_head.norm.weight.to_local()[0] += 2.0**-20  # one element of each rank's shard
    return intact, trainer.shard_report()


def test_shard_report_shows_the_layout_and_any_changed_bit(two_ranks: RankPool, tiny_models: dict[str, Path]) -> None:
    for intact, changed in two_ranks.run(shard_reports, tiny_models["qwen3_tied"]):
        assert all(tensor.checksum == tensor.source_checksum for tensor in intact)
        for tensor in intact:
            assert len(tensor.local_numel) == 2
            assert sum(tensor.local_numel) == np.prod(tensor.shape)
        assert [t.hf_name for t in changed if t.checksum != t.source_checksum] == ["model.norm.weight"]


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


def hf_scores(model: Path, dtype: torch.dtype) -> dict[str, np.ndarray]:
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="sdpa").eval()
    scores = {}
    for sample in samples():
        ids = torch.from_numpy(sample.input_ids)
        with torch.no_grad():
            log_softmax = torch.log_softmax(hf(ids[None]).logits[0].float() / TEMPERATURE, dim=-1)
        picked = log_softmax[:-1].gather(1, ids[1:, None])[:, 0].numpy()
        scores[sample.sample_id] = picked[sample.response_mask[1:]]
    return scores


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


def use_frozen(rank: int, num_ranks: int, model: Path) -> tuple[bool, bool, dict[str, np.ndarray]]:
    trainer = build_olmo_core(rank, num_ranks, model, trainable=False)
    return any(p.requires_grad for p in trainer._model.parameters()), trainer._optimizer is None, score(trainer)


def test_a_frozen_reference_scores_and_has_no_optimiser(two_ranks: RankPool, tiny_models: dict[str, Path]) -> None:
    expected = hf_scores(tiny_models["llama"], torch.float32)
    for needs_gradients, has_no_optimiser, scores in two_ranks.run(use_frozen, tiny_models["llama"]):
        assert not needs_gradients
        assert has_no_optimiser
        assert largest_difference(scores, expected) <= 1e-5


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


# --- Checkpoints and export ---------------------------------------------------------------------------------------


def train_and_save(rank: int, num_ranks: int, model: Path, folder: Path) -> tuple[Any, list[Any]]:
    plan = PLAN if num_ranks == 2 else ONE_RANK_PLAN
    trainer = build_olmo_core(rank, num_ranks, model)
    trainer.save(folder / "v0")
    train(trainer, rank, plan, 2)
    trainer.save(folder / "v2")
    rng = torch.rand(3).numpy()
    steps = train(trainer, rank, plan, 2)
    return weights_of(trainer), [steps, trainer.policy_version, rng]


def train_without_saving(rank: int, num_ranks: int, model: Path) -> Any:
    trainer = build_olmo_core(rank, num_ranks, model)
    train(trainer, rank, PLAN if num_ranks == 2 else ONE_RANK_PLAN, 4)
    return weights_of(trainer)


def resume(rank: int, num_ranks: int, model: Path, checkpoint: Path) -> tuple[Any, list[Any]]:
    plan = PLAN if num_ranks == 2 else ONE_RANK_PLAN
    trainer = build_olmo_core(rank, num_ranks, model)
    torch.manual_seed(99)
    trainer.load(checkpoint)
    rng = torch.rand(3).numpy()
    assert trainer.policy_version == 2
    steps = train(trainer, rank, plan, 2)
    return weights_of(trainer), [steps, trainer.policy_version, rng]


@pytest.fixture(scope="module")
def saved(
    two_ranks: RankPool, tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, two_ranks.run(train_and_save, tiny_models["qwen3_tied"], folder)


def test_resume_on_as_many_ranks_is_exact(
    two_ranks: RankPool, tiny_models: dict[str, Path], saved: tuple[Path, list[Any]]
) -> None:
    """Weights, metrics, learning rates, version and generator state continue bit for bit."""
    resumed = two_ranks.run(resume, tiny_models["qwen3_tied"], saved[0] / "v2")
    for (weights, (steps, version, rng)), (expected, (expected_steps, expected_version, expected_rng)) in zip(
        resumed, saved[1], strict=True
    ):
        assert largest_difference(weights, expected) == 0
        assert steps == expected_steps
        assert version == expected_version == 4
        np.testing.assert_array_equal(rng, expected_rng)


def test_resume_on_fewer_ranks_is_equal_to_rounding(
    one_rank: RankPool, tiny_models: dict[str, Path], saved: tuple[Path, list[Any]]
) -> None:
    ((weights, (steps, version, _)),) = one_rank.run(resume, tiny_models["qwen3_tied"], saved[0] / "v2")
    expected, (expected_steps, _, _) = saved[1][0]
    assert version == 4
    assert [s["optim/lr"] for s in steps] == [s["optim/lr"] for s in expected_steps]
    for name, values in expected.items():
        assert np.abs(weights[name] - values).max() <= 1e-5 * np.abs(values).max(), name


def test_saving_changes_nothing(
    two_ranks: RankPool, tiny_models: dict[str, Path], saved: tuple[Path, list[Any]]
) -> None:
    """PyTorch fills in missing optimiser state by a step that counts; a save before the first step must not."""
    unsaved = two_ranks.run(train_without_saving, tiny_models["qwen3_tied"])
    assert largest_difference(unsaved[0], saved[1][0][0]) == 0


def load_errors(rank: int, num_ranks: int, model: Path, other: Path, folder: Path) -> list[str]:
    messages = []
    trainer, stranger = (build_olmo_core(rank, num_ranks, path) for path in (model, other))
    for action in (
        lambda: stranger.load(folder / "v2"),
        lambda: trainer.load(folder / "nothing here"),
        lambda: trainer.save(folder / "v2"),
    ):
        try:
            action()
        except DataError as error:
            messages.append(str(error))
        else:
            messages.append("done")
    return messages


def test_unusable_checkpoints_are_refused_by_name(
    two_ranks: RankPool, tiny_models: dict[str, Path], saved: tuple[Path, list[Any]]
) -> None:
    for other_model, missing, taken in two_ranks.run(
        load_errors, tiny_models["qwen3_tied"], tiny_models["llama"], saved[0]
    ):
        assert "attention.k_norm.weight' has shape (16,) in the checkpoint and none in the model" in other_model
        assert "trainer.json is missing" in missing
        assert "already holds a checkpoint" in taken


def train_and_export(rank: int, num_ranks: int, model: Path, folder: Path, dtype: str) -> dict[str, np.ndarray]:
    trainer = build_olmo_core(rank, num_ranks, model, dtype=dtype)
    train(trainer, rank, PLAN, 1)
    trainer.export_hf(folder)
    return score(trainer)


@pytest.mark.parametrize("family", ["qwen3_tied", "olmo2"])
def test_an_export_loads_in_transformers_and_scores_the_same(
    two_ranks: RankPool, tiny_models: dict[str, Path], tmp_path: Path, family: str
) -> None:
    source = tiny_models[family]
    scores = two_ranks.run(train_and_export, source, tmp_path / "out", "float32")[0]
    assert largest_difference(scores, hf_scores(tmp_path / "out", torch.float32)) <= 1e-5
    assert largest_difference(scores, hf_scores(source, torch.float32)) > 1e-5, "the export must be the trained weights"
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()


def test_an_export_in_another_dtype_says_so(two_ranks: RankPool, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    two_ranks.run(train_and_export, tiny_models["qwen3"], tmp_path / "out", "bfloat16")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
