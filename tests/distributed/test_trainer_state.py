"""A trainer's state goes out by Hugging Face name and comes back, on any number of ranks; its layers can be looked at.

Functions whose name does not start with `test_` run in the ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from grpo_lib.algo.packing import pack
from grpo_lib.errors import DataError
from grpo_lib.trainers.hf_checkpoint import HfFolder
from grpo_lib.trainers.whole_model import dump_state, load_hf_weights, restore_state
from grpo_lib.types import TRAINING_STATE, StateKind
from tests.distributed.gloo_ranks import RankPool
from tests.distributed.trainer_cases import (
    OLMO_CORE,
    ONE_RANK_PLAN,
    PACK_LENGTH,
    PLAN,
    ZERO,
    BackendCase,
    each_backend,
    largest_difference,
    policy_loss,
    samples,
    state_of,
    train,
    weights_of,
)


def train_and_dump(rank: int, num_ranks: int, case: BackendCase, model: Path, folder: Path) -> Any:
    trainer = case.build(rank, num_ranks, model)
    train(trainer, rank, PLAN, 2)
    dump_state(trainer, folder, TRAINING_STATE)
    return train(trainer, rank, PLAN, 1)[0], weights_of(trainer)


def restore_and_train(rank: int, num_ranks: int, case: BackendCase, model: Path, folder: Path) -> Any:
    plan = PLAN if num_ranks == 2 else ONE_RANK_PLAN
    trainer = case.build(rank, num_ranks, model)
    # Another state, and gradients of it, which must not leak into the restored one.
    train(trainer, rank, plan, 1)
    trainer.forward_backward(plan.micro_batches[rank], policy_loss(), loss_denominator=1.0)
    restore_state(trainer, folder)
    assert trainer.policy_version == 2
    return train(trainer, rank, plan, 1)[0], weights_of(trainer)


@each_backend
def test_a_restored_state_takes_the_same_next_step(
    one_rank: RankPool, two_ranks: RankPool, tiny_models: dict[str, Path], tmp_path: Path, case: BackendCase
) -> None:
    model = tiny_models["qwen3_tied"]
    step, weights = two_ranks.run(train_and_dump, case, model, tmp_path / "state")[0]
    again, weights_again = two_ranks.run(restore_and_train, case, model, tmp_path / "state")[0]
    assert again == step
    assert largest_difference(weights_again, weights) == 0
    alone, weights_alone = one_rank.run(restore_and_train, case, model, tmp_path / "state")[0]
    assert alone["optim/lr"] == step["optim/lr"]
    assert alone["optim/grad_norm"] == pytest.approx(step["optim/grad_norm"], rel=1e-5)
    assert largest_difference(weights_alone, weights) <= 1e-6


def restore_and_show(rank: int, num_ranks: int, case: BackendCase, model: Path, folder: Path) -> Any:
    trainer = case.build(rank, num_ranks, model)
    restore_state(trainer, folder)
    return (
        {kind: state_of(trainer, kind) for kind in TRAINING_STATE},
        train(trainer, rank, PLAN, 1),
        weights_of(trainer),
    )


@pytest.mark.parametrize(
    ("source", "target"),
    [pair for zero in (ZERO[0], ZERO[2], ZERO[3]) for pair in ((OLMO_CORE, zero), (zero, OLMO_CORE))],
    ids=lambda case: case.name,
)
def test_a_state_means_the_same_to_another_backend(
    two_ranks: RankPool, tiny_models: dict[str, Path], tmp_path: Path, source: BackendCase, target: BackendCase
) -> None:
    """Weights and moments arrive bit for bit, and the next step is the same."""
    model = tiny_models["olmo2"]
    (step, weights), *_ = two_ranks.run(train_and_dump, source, model, tmp_path / "state")
    for state, (other_step,), other_weights in two_ranks.run(restore_and_show, target, model, tmp_path / "state"):
        for kind in TRAINING_STATE:
            dumped = load_file(tmp_path / "state" / f"{kind}.safetensors")
            assert dumped.keys() == state[kind].keys()
            assert any(tensor.any() for tensor in dumped.values())
            for name, tensor in dumped.items():
                np.testing.assert_array_equal(state[kind][name], tensor.numpy())
        assert other_step == pytest.approx(step, rel=1e-5)
        assert largest_difference(other_weights, weights) <= 1e-6


def train_and_load(rank: int, num_ranks: int, case: BackendCase, model: Path) -> Any:
    trainer = case.build(rank, num_ranks, model)
    before, scores = weights_of(trainer), trainer.logprobs(PLAN.micro_batches[rank][0])
    train(trainer, rank, PLAN, 2)
    moved = trainer.logprobs(PLAN.micro_batches[rank][0])
    load_hf_weights(trainer, HfFolder(model))
    again = trainer.logprobs(PLAN.micro_batches[rank][0])
    return largest_difference(weights_of(trainer), before), torch.equal(again, scores), torch.equal(moved, scores)


@each_backend
def test_weights_of_a_model_folder_replace_those_that_were_trained(
    two_ranks: RankPool, tiny_models: dict[str, Path], case: BackendCase
) -> None:
    for difference, same, unmoved in two_ranks.run(train_and_load, case, tiny_models["qwen3_tied"]):
        assert (difference, same, unmoved) == (0, True, False)


def restore_and_report(rank: int, num_ranks: int, case: BackendCase, model: Path, folder: Path) -> str:
    trainer = case.build(rank, num_ranks, model)
    with pytest.raises(DataError) as caught:
        restore_state(trainer, folder)
    return str(caught.value)


@pytest.mark.parametrize("case", [OLMO_CORE, ZERO[2]], ids=lambda case: case.name)
def test_a_state_that_does_not_fit_names_file_and_tensor(
    one_rank: RankPool, two_ranks: RankPool, tiny_models: dict[str, Path], tmp_path: Path, case: BackendCase
) -> None:
    model = tiny_models["qwen3_tied"]
    two_ranks.run(train_and_dump, case, model, tmp_path / "state")
    (message,) = one_rank.run(restore_and_report, case, tiny_models["llama"], tmp_path / "state")
    assert "weight.safetensors" in message
    assert "another model" in message
    moments = load_file(tmp_path / "state" / "exp_avg.safetensors")
    del moments["model.norm.weight"]
    save_file(moments, tmp_path / "state" / "exp_avg.safetensors")
    (message,) = one_rank.run(restore_and_report, case, model, tmp_path / "state")
    assert "exp_avg.safetensors has 'model.norm.weight' in shape none" in message
    (tmp_path / "state" / "state.json").unlink()
    (message,) = one_rank.run(restore_and_report, case, model, tmp_path / "state")
    assert "no complete training state" in message


def gradients(rank: int, num_ranks: int, case: BackendCase, model: Path) -> dict[str, np.ndarray]:
    trainer = case.build(rank, num_ranks, model)
    with pytest.raises(AssertionError, match="no gradient outside"):
        next(trainer.named_state(StateKind.GRADIENT))
    plan = PLAN if num_ranks == 2 else ONE_RANK_PLAN
    trainer.forward_backward(plan.micro_batches[rank], policy_loss(), loss_denominator=float(plan.num_trained_tokens))
    dumped = {n: t.numpy() for b in trainer.named_state(StateKind.GRADIENT) for n, t in b.tensors}
    assert list(dumped) == [entry.name for entry in trainer.manifest().entries]
    return dumped


@each_backend
def test_gradients_are_whole_whatever_the_number_of_ranks(
    one_rank: RankPool, two_ranks: RankPool, tiny_models: dict[str, Path], case: BackendCase
) -> None:
    (alone,) = one_rank.run(gradients, case, tiny_models["qwen3_tied"])
    for together in two_ranks.run(gradients, case, tiny_models["qwen3_tied"]):
        assert together.keys() == alone.keys()
        for name, gradient in alone.items():
            assert np.abs(together[name] - gradient).max() <= 1e-5 * np.abs(gradient).max(), name


def hidden(rank: int, num_ranks: int, case: BackendCase, model: Path) -> dict[str, np.ndarray]:
    trainer = case.build(rank, num_ranks, model)
    return {name: tensor.numpy() for name, tensor in trainer.hidden_states(pack(samples(), PACK_LENGTH))}


@pytest.mark.parametrize("family", ["qwen3_tied", "llama", "olmo2"])
@each_backend
def test_hidden_states_are_those_of_each_document_alone(
    two_ranks: RankPool, tiny_models: dict[str, Path], case: BackendCase, family: str
) -> None:
    batch = pack(samples(), PACK_LENGTH)
    model = AutoModelForCausalLM.from_pretrained(tiny_models[family], dtype=torch.float32).eval()
    num_layers = model.config.num_hidden_layers
    blocks: list[torch.Tensor] = []
    for block in model.model.layers:
        block.register_forward_hook(lambda _module, _inputs, output: blocks.append(output))
    for layers in two_ranks.run(hidden, case, tiny_models[family]):
        assert list(layers) == ["embedding", *(f"layer {index}" for index in range(num_layers))]
        for row, document in {(r, d) for r in range(batch.num_rows) for d in batch.doc_ids[r].unique().tolist() if d}:
            inside = batch.doc_ids[row] == document
            ids = batch.input_ids[row, inside]
            blocks.clear()
            with torch.no_grad():
                model(ids[None], use_cache=False)
                expected = [model.model.embed_tokens(ids), *(block[0] for block in blocks)]
            for (name, layer), states in zip(layers.items(), expected, strict=True):
                found = layer[row, inside.numpy()]
                scale = float(states.abs().max())
                assert np.abs(found - states.numpy()).max() <= 1e-5 * scale, (name, row, document)
        assert not layers["layer 0"][batch.doc_ids.numpy() == 0].any(), "padding is 0"
