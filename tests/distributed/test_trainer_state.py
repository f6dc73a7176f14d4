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
from grpo_lib.trainers.whole_model import dump_state, restore_state
from grpo_lib.types import TRAINING_STATE, StateKind
from tests.distributed.gloo_ranks import RankPool
from tests.distributed.trainer_cases import (
    ONE_RANK_PLAN,
    PACK_LENGTH,
    PLAN,
    build_olmo_core,
    largest_difference,
    policy_loss,
    samples,
    train,
    weights_of,
)


def train_and_dump(rank: int, num_ranks: int, model: Path, folder: Path) -> Any:
    trainer = build_olmo_core(rank, num_ranks, model)
    train(trainer, rank, PLAN, 2)
    dump_state(trainer, folder, TRAINING_STATE)
    return train(trainer, rank, PLAN, 1)[0], weights_of(trainer)


def restore_and_train(rank: int, num_ranks: int, model: Path, folder: Path) -> Any:
    plan = PLAN if num_ranks == 2 else ONE_RANK_PLAN
    trainer = build_olmo_core(rank, num_ranks, model)
    # Another state, and gradients of it, which must not leak into the restored one.
    train(trainer, rank, plan, 1)
    trainer.forward_backward(plan.micro_batches[rank], policy_loss(), loss_denominator=1.0)
    restore_state(trainer, folder)
    assert trainer.policy_version == 2
    return train(trainer, rank, plan, 1)[0], weights_of(trainer)


def test_a_restored_state_takes_the_same_next_step(
    one_rank: RankPool, two_ranks: RankPool, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    model = tiny_models["qwen3_tied"]
    step, weights = two_ranks.run(train_and_dump, model, tmp_path / "state")[0]
    again, weights_again = two_ranks.run(restore_and_train, model, tmp_path / "state")[0]
    assert again == step
    assert largest_difference(weights_again, weights) == 0
    alone, weights_alone = one_rank.run(restore_and_train, model, tmp_path / "state")[0]
    assert alone["optim/lr"] == step["optim/lr"]
    assert alone["optim/grad_norm"] == pytest.approx(step["optim/grad_norm"], rel=1e-5)
    assert largest_difference(weights_alone, weights) <= 1e-6


def restore_and_report(rank: int, num_ranks: int, model: Path, folder: Path) -> str:
    trainer = build_olmo_core(rank, num_ranks, model)
    with pytest.raises(DataError) as caught:
        restore_state(trainer, folder)
    return str(caught.value)


def test_a_state_that_does_not_fit_names_file_and_tensor(
    one_rank: RankPool, two_ranks: RankPool, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    model = tiny_models["qwen3_tied"]
    two_ranks.run(train_and_dump, model, tmp_path / "state")
    (message,) = one_rank.run(restore_and_report, tiny_models["llama"], tmp_path / "state")
    assert "weight.safetensors" in message
    assert "another model" in message
    moments = load_file(tmp_path / "state" / "exp_avg.safetensors")
    del moments["model.norm.weight"]
    save_file(moments, tmp_path / "state" / "exp_avg.safetensors")
    (message,) = one_rank.run(restore_and_report, model, tmp_path / "state")
    assert "exp_avg.safetensors has 'model.norm.weight' in shape none" in message
    (tmp_path / "state" / "state.json").unlink()
    (message,) = one_rank.run(restore_and_report, model, tmp_path / "state")
    assert "no complete training state" in message


def gradients(rank: int, num_ranks: int, model: Path) -> dict[str, np.ndarray]:
    trainer = build_olmo_core(rank, num_ranks, model)
    with pytest.raises(AssertionError, match="no gradient outside"):
        next(trainer.named_state(StateKind.GRADIENT))
    plan = PLAN if num_ranks == 2 else ONE_RANK_PLAN
    trainer.forward_backward(plan.micro_batches[rank], policy_loss(), loss_denominator=float(plan.num_trained_tokens))
    dumped = {n: t.numpy() for b in trainer.named_state(StateKind.GRADIENT) for n, t in b.tensors}
    assert list(dumped) == [entry.name for entry in trainer.manifest().entries]
    return dumped


def test_gradients_are_whole_whatever_the_number_of_ranks(
    one_rank: RankPool, two_ranks: RankPool, tiny_models: dict[str, Path]
) -> None:
    (alone,) = one_rank.run(gradients, tiny_models["qwen3_tied"])
    for together in two_ranks.run(gradients, tiny_models["qwen3_tied"]):
        assert together.keys() == alone.keys()
        for name, gradient in alone.items():
            assert np.abs(together[name] - gradient).max() <= 1e-5 * np.abs(gradient).max(), name


def hidden(rank: int, num_ranks: int, model: Path) -> dict[str, np.ndarray]:
    trainer = build_olmo_core(rank, num_ranks, model)
    return {name: tensor.numpy() for name, tensor in trainer.hidden_states(pack(samples(), PACK_LENGTH))}


@pytest.mark.parametrize("family", ["qwen3_tied", "llama", "olmo2"])
def test_hidden_states_are_those_of_each_document_alone(
    two_ranks: RankPool, tiny_models: dict[str, Path], family: str
) -> None:
    batch = pack(samples(), PACK_LENGTH)
    model = AutoModelForCausalLM.from_pretrained(tiny_models[family], dtype=torch.float32).eval()
    num_layers = model.config.num_hidden_layers
    blocks: list[torch.Tensor] = []
    for block in model.model.layers:
        block.register_forward_hook(lambda _module, _inputs, output: blocks.append(output))
    for layers in two_ranks.run(hidden, tiny_models[family]):
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
