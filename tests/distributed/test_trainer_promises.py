"""What every backend promises beyond numbers: padding, dtypes, ties, frozen references, and failing together.

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
from grpo_lib.errors import NonFiniteGradient, NonFiniteLogprobs
from grpo_lib.interfaces import InspectableTrainer
from grpo_lib.types import PackedBatch, StateKind, StepMetrics
from tests.distributed.gloo_ranks import RankPool
from tests.distributed.trainer_cases import (
    BACKENDS,
    CONFIG,
    ONE_RANK_PLAN,
    PACK_LENGTH,
    PLAN,
    BackendCase,
    each_backend,
    each_bf16_backend,
    hf_scores,
    largest_difference,
    policy_loss,
    samples,
    score,
    state_of,
    train,
    weights_of,
)

# --- Documents and padding ----------------------------------------------------------------------------------------


def score_permuted(rank: int, num_ranks: int, case: BackendCase, model: Path) -> tuple[float, float, str]:
    trainer: Any = case.build(rank, num_ranks, model)
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


@each_backend
def test_order_in_the_pack_changes_nothing_and_boundaries_change_much(
    one_rank: RankPool, tiny_models: dict[str, Path], case: BackendCase
) -> None:
    """One run, three facts: the second is what makes the first mean something."""
    ((permuted, leaked, message),) = one_rank.run(score_permuted, case, tiny_models["qwen3"])
    assert permuted <= 1e-5
    assert leaked > 0.1
    assert "row 0: position_ids do not restart" in message


def gradient_of_unused_tokens(rank: int, num_ranks: int, case: BackendCase, model: Path) -> np.ndarray:
    trainer = case.build(rank, num_ranks, model)
    trainer.forward_backward(PLAN.micro_batches[rank], policy_loss(), loss_denominator=10.0)
    return state_of(trainer, StateKind.GRADIENT)["model.embed_tokens.weight"]


@each_backend
def test_padding_has_exactly_zero_gradient(
    two_ranks: RankPool, tiny_models: dict[str, Path], case: BackendCase
) -> None:
    used = {int(token) for sample in samples() for token in sample.input_ids[:-1]}
    assert 0 not in used, "id 0 must be padding only"
    gradient = two_ranks.run(gradient_of_unused_tokens, case, tiny_models["qwen3"])[0]
    assert np.all(gradient[0] == 0)
    assert np.abs(gradient[sorted(used)]).max(axis=1).min() > 0


# --- Families, dtypes, ties ---------------------------------------------------------------------------------------


def score_in(rank: int, num_ranks: int, case: BackendCase, model: Path, dtype: str) -> dict[str, np.ndarray]:
    return score(case.build(rank, num_ranks, model, dtype=dtype))


@pytest.mark.parametrize("family", ["qwen3_tied", "qwen3", "llama", "llama3", "olmo2"])
@each_backend
def test_families_equal_hugging_face(
    one_rank: RankPool, tiny_models: dict[str, Path], case: BackendCase, family: str
) -> None:
    """Packed here, document by document there."""
    (scores,) = one_rank.run(score_in, case, tiny_models[family], "float32")
    assert largest_difference(scores, hf_scores(tiny_models[family], torch.float32)) <= 2e-6


@pytest.mark.parametrize("family", ["qwen3_tied", "llama3", "olmo2"])
@each_bf16_backend
def test_families_equal_hugging_face_in_bf16(
    one_rank: RankPool, tiny_models: dict[str, Path], case: BackendCase, family: str
) -> None:
    (scores,) = one_rank.run(score_in, case, tiny_models[family], "bfloat16")
    assert largest_difference(scores, hf_scores(tiny_models[family], torch.bfloat16)) <= 5e-3


# One rank may keep its tensors in another way than several do.
each_pool = pytest.mark.parametrize("pool", ["one_rank", "two_ranks"])


def train_in_bf16(rank: int, num_ranks: int, case: BackendCase, model: Path) -> tuple[Any, ...]:
    config = CONFIG.model_copy(update={"learning_rate": 1e-6, "warmup_steps": 0, "lr_scheduler": "constant"})
    trainer = case.build(rank, num_ranks, model, dtype="bfloat16", config=config)
    master, sent = state_of(trainer, StateKind.WEIGHT), weights_of(trainer)
    steps = train(trainer, rank, PLAN, 2)
    moved = largest_difference(state_of(trainer, StateKind.WEIGHT), master)
    is_rounded = all(
        torch.equal(torch.from_numpy(tensor).bfloat16().float(), torch.from_numpy(weights_of(trainer)[name]))
        for name, tensor in state_of(trainer, StateKind.WEIGHT).items()
    )
    return (
        [step["optim/update_rms"] for step in steps],
        moved,
        largest_difference(weights_of(trainer), sent),
        is_rounded,
    )


@each_pool
@each_bf16_backend
def test_bf16_keeps_fp32_master_weights_that_a_small_learning_rate_moves(
    request: pytest.FixtureRequest, tiny_models: dict[str, Path], case: BackendCase, pool: str
) -> None:
    """At 1e-6 an update is far below bf16's spacing: it must not be lost, and the engine may not see it yet."""
    ranks: RankPool = request.getfixturevalue(pool)
    for update_rms, moved, visible, is_rounded in ranks.run(train_in_bf16, case, tiny_models["qwen3_tied"]):
        assert all(0 < rms < 1e-6 for rms in update_rms)
        assert 0 < moved < 1e-5
        assert visible < 1e-2
        assert is_rounded


def accumulate_in_bf16(rank: int, num_ranks: int, case: BackendCase, model: Path) -> float:
    """|gradient of all micro-batches - sum of each one's| / |gradient|, in bf16."""
    trainer = case.build(rank, num_ranks, model, dtype="bfloat16")
    batches = PLAN.micro_batches[rank]
    total: dict[str, np.ndarray] = {}
    for batch in batches:
        trainer.forward_backward([batch], policy_loss(), loss_denominator=10.0)
        for name, gradient in state_of(trainer, StateKind.GRADIENT).items():
            total[name] = total[name] + gradient if name in total else gradient
        trainer.load_state(StateKind.WEIGHT, _reader(state_of(trainer, StateKind.WEIGHT)))  # drops the gradients
    trainer.forward_backward(batches, policy_loss(), loss_denominator=10.0)
    together = state_of(trainer, StateKind.GRADIENT)
    return max(float(np.abs(together[name] - total[name]).max() / np.abs(total[name]).max()) for name in total)


@each_pool
@each_bf16_backend
def test_gradients_of_micro_batches_are_added_in_fp32(
    request: pytest.FixtureRequest, tiny_models: dict[str, Path], case: BackendCase, pool: str
) -> None:
    """Sums in bf16 would be off by 2^-8."""
    assert len(PLAN.micro_batches[0]) > 1
    ranks: RankPool = request.getfixturevalue(pool)
    assert max(ranks.run(accumulate_in_bf16, case, tiny_models["qwen3_tied"])) <= 1e-6


def train_tied(rank: int, num_ranks: int, case: BackendCase, model: Path) -> tuple[dict[str, np.ndarray], Any]:
    trainer = case.build(rank, num_ranks, model)
    train(trainer, rank, PLAN, 3)
    return weights_of(trainer), trainer.local_numel()


@each_backend
def test_tied_embeddings_stay_one_tensor(two_ranks: RankPool, tiny_models: dict[str, Path], case: BackendCase) -> None:
    """What the weights are after training with it, the contract says."""
    for weights, local_numel in two_ranks.run(train_tied, case, tiny_models["qwen3_tied"]):
        assert "lm_head.weight" not in weights
        assert local_numel.keys() == weights.keys()


def use_frozen(rank: int, num_ranks: int, case: BackendCase, model: Path) -> tuple[dict[str, np.ndarray], float, bool]:
    policy = case.build(rank, num_ranks, model)
    frozen: Any = case.build(rank, num_ranks, model, trainable=False)
    scores = score(frozen)
    train(policy, rank, PLAN, 1)
    is_same = largest_difference(weights_of(frozen), weights_of(case.build(rank, num_ranks, model))) == 0
    assert not any(parameter.requires_grad for parameter in frozen._model.parameters())
    return scores, largest_difference(score(frozen), scores), is_same


@each_backend
def test_a_frozen_reference_scores_beside_the_policy_and_stays(
    two_ranks: RankPool, tiny_models: dict[str, Path], case: BackendCase
) -> None:
    expected = hf_scores(tiny_models["llama"], torch.float32)
    for scores, drift, is_same in two_ranks.run(use_frozen, case, tiny_models["llama"]):
        assert largest_difference(scores, expected) <= 2e-6
        assert drift == 0
        assert is_same


# --- Steps --------------------------------------------------------------------------------------------------------


def train_without_effect(rank: int, num_ranks: int, case: BackendCase, model: Path) -> Any:
    config = CONFIG.model_copy(update={"learning_rate": 1e-30, "warmup_steps": 0})
    trainer = case.build(rank, num_ranks, model, config=config)
    return train(trainer, rank, PLAN, 1), trainer.policy_version


@each_backend
def test_a_step_that_moves_no_weight_says_so(
    two_ranks: RankPool, tiny_models: dict[str, Path], case: BackendCase
) -> None:
    """The optimiser runs and the version advances; only comparing the weights shows that nothing was learned."""
    for steps, version in two_ranks.run(train_without_effect, case, tiny_models["qwen3"]):
        assert version == 1
        assert steps[0]["optim/grad_norm"] > 0
        assert (steps[0]["optim/weights_moved"], steps[0]["optim/update_rms"]) == (0.0, 0.0)


def score_between_backward_and_step(
    rank: int, num_ranks: int, case: BackendCase, model: Path, between: bool
) -> dict[str, np.ndarray]:
    trainer = case.build(rank, num_ranks, model)
    trainer.forward_backward(PLAN.micro_batches[rank], policy_loss(), loss_denominator=10.0)
    if between:
        score(trainer)
    trainer.optim_step()
    return score(trainer)


@each_backend
def test_scoring_leaves_no_stale_weights_behind(
    two_ranks: RankPool, tiny_models: dict[str, Path], case: BackendCase
) -> None:
    """What a forward pass gathered may outlive it; the next step would not reach that copy."""
    plain = two_ranks.run(score_between_backward_and_step, case, tiny_models["qwen3"], False)
    between = two_ranks.run(score_between_backward_and_step, case, tiny_models["qwen3"], True)
    assert [largest_difference(a, b) for a, b in zip(plain, between, strict=True)] == [0.0, 0.0]


def gradients_with(
    rank: int, num_ranks: int, case: BackendCase, model: Path, checkpointing: bool
) -> tuple[dict[str, np.ndarray], int]:
    """Gradients, and how often the first block's attention ran."""
    config = CONFIG.model_copy(update={"activation_checkpointing": checkpointing})
    trainer: Any = case.build(rank, num_ranks, model, config=config)
    calls: list[str] = []
    ends = (".attention", ".self_attn")  # OLMo-core's name and transformers'
    attention = next(module for name, module in trainer._model.named_modules() if name.endswith(ends))
    attention.register_forward_pre_hook(lambda module, args: calls.append("forward"))
    trainer.forward_backward(PLAN.micro_batches[rank], policy_loss(), loss_denominator=10.0)
    return state_of(trainer, StateKind.GRADIENT), len(calls)


@each_backend
def test_recomputing_activations_changes_no_gradient(
    two_ranks: RankPool, tiny_models: dict[str, Path], case: BackendCase
) -> None:
    num_batches = len(PLAN.micro_batches[0])
    kept = two_ranks.run(gradients_with, case, tiny_models["qwen3_tied"], False)
    recomputed = two_ranks.run(gradients_with, case, tiny_models["qwen3_tied"], True)
    for (expected, calls), (gradients, more_calls) in zip(kept, recomputed, strict=True):
        assert (calls, more_calls) == (num_batches, 2 * num_batches)
        assert largest_difference(gradients, expected) == 0


# --- Failures -----------------------------------------------------------------------------------------------------


def _reader(tensors: dict[str, np.ndarray]) -> Any:
    return lambda name: torch.from_numpy(tensors[name])


def poison_one_token(rank: int, num_ranks: int, case: BackendCase, model: Path, token: int) -> tuple[str, bool]:
    trainer = case.build(rank, num_ranks, model)
    weights = state_of(trainer, StateKind.WEIGHT)
    weights["model.embed_tokens.weight"][token] = np.nan
    trainer.load_state(StateKind.WEIGHT, _reader(weights))
    try:
        train(trainer, rank, PLAN, 1)
    except NonFiniteLogprobs as error:
        return str(error), _has_no_gradient(trainer)
    return "trained", False


def _has_no_gradient(trainer: InspectableTrainer) -> bool:
    try:
        state_of(trainer, StateKind.GRADIENT)
    except AssertionError:
        return True
    return False


@each_backend
def test_nan_on_one_rank_stops_every_rank_and_names_the_sample(
    two_ranks: RankPool, tiny_models: dict[str, Path], case: BackendCase
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
    messages = two_ranks.run(poison_one_token, case, tiny_models["qwen3"], token)
    assert messages[0] == messages[1]
    message, gradients_are_dropped = messages[0]
    assert message.startswith("rank 1: ")
    assert any(sample_id in message for sample_id in named)
    assert gradients_are_dropped


class InfiniteLoss:
    """The policy loss times infinity."""

    def __call__(
        self, logprobs: torch.Tensor, batch: PackedBatch, loss_denominator: float
    ) -> tuple[torch.Tensor, StepMetrics]:
        value, metrics = policy_loss()(logprobs, batch, loss_denominator)
        return value * torch.inf, metrics


def overflow_a_gradient(rank: int, num_ranks: int, case: BackendCase, model: Path) -> tuple[Any, ...]:
    trainer, other = case.build(rank, num_ranks, model), case.build(rank, num_ranks, model)
    before = state_of(trainer, StateKind.WEIGHT)
    trainer.forward_backward(
        PLAN.micro_batches[rank], InfiniteLoss() if rank == 1 else policy_loss(), loss_denominator=10.0
    )
    try:
        trainer.optim_step()
    except NonFiniteGradient as error:
        message = str(error)
    else:
        message = "applied"
    version, change = trainer.policy_version, largest_difference(state_of(trainer, StateKind.WEIGHT), before)
    is_dropped = _has_no_gradient(trainer)
    steps = [train(t, rank, PLAN, 1) for t in (trainer, other)]
    same_step = steps[0] == steps[1] and largest_difference(weights_of(trainer), weights_of(other)) == 0
    return message, version, change, is_dropped, same_step


@each_backend
def test_a_non_finite_gradient_is_not_applied(
    two_ranks: RankPool, tiny_models: dict[str, Path], case: BackendCase
) -> None:
    """Neither it nor anything it touched is left: the next step is that of a trainer that never met it."""
    for message, version, change, is_dropped, same_step in two_ranks.run(
        overflow_a_gradient, case, tiny_models["qwen3"]
    ):
        assert message.startswith(("gradient norm is nan before step 0", "gradient norm is inf before step 0"))
        assert (version, change) == (0, 0.0)
        assert is_dropped
        assert same_step


def build_with_wrong_rank_count(rank: int, num_ranks: int, case: BackendCase, model: Path) -> str:
    try:
        case.build(rank, num_ranks + 1, model)
    except ValueError as error:
        return str(error)
    return "built"


@pytest.mark.parametrize("case", BACKENDS[:2], ids=lambda case: case.name)
def test_a_process_group_of_another_size_is_refused(
    two_ranks: RankPool, tiny_models: dict[str, Path], case: BackendCase
) -> None:
    messages = two_ranks.run(build_with_wrong_rank_count, case, tiny_models["qwen3"])
    assert "trainer rank 1 of 3 needs a process group to match, found rank 1 of 2" in messages[1]


def step_with_one_rank_out_of_work(rank: int, num_ranks: int, case: BackendCase, model: Path) -> dict[str, float]:
    """A rank's micro-batches may have nothing trained in them at all, again and again."""
    trainer = case.build(rank, num_ranks, model)
    batches = ONE_RANK_PLAN.micro_batches[0]
    own = batches if rank == 0 else [_untrained(batch) for batch in batches]
    trainer.forward_backward(own, policy_loss(), loss_denominator=float(ONE_RANK_PLAN.num_trained_tokens))
    return trainer.optim_step().values()


def _untrained(batch: PackedBatch) -> PackedBatch:
    return replace(batch, response_mask=torch.zeros_like(batch.response_mask))


def step_alone(rank: int, num_ranks: int, case: BackendCase, model: Path) -> dict[str, float]:
    return train(case.build(rank, num_ranks, model), rank, ONE_RANK_PLAN, 1)[0]


@each_backend
def test_a_rank_without_trained_tokens_adds_nothing(
    one_rank: RankPool, two_ranks: RankPool, tiny_models: dict[str, Path], case: BackendCase
) -> None:
    (alone,) = one_rank.run(step_alone, case, tiny_models["olmo2"])
    for together in two_ranks.run(step_with_one_rank_out_of_work, case, tiny_models["olmo2"]):
        assert together == pytest.approx(alone, rel=1e-6)
