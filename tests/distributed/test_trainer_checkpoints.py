"""The OLMo-core trainer saves, resumes on any number of ranks, and exports.

Functions whose name does not start with `test_` run in the ranks.
"""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from grpo_lib.errors import DataError, StorageError
from grpo_lib.trainers.whole_model import export_hf
from tests.distributed.gloo_ranks import RankPool
from tests.distributed.trainer_cases import (
    ONE_RANK_PLAN,
    PLAN,
    build_olmo_core,
    hf_scores,
    largest_difference,
    score,
    train,
    weights_of,
)


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


def save_and_load(rank: int, num_ranks: int, model: Path, folder: Path) -> tuple[float, float]:
    trainer, other = (build_olmo_core(rank, num_ranks, model) for _ in range(2))
    train(trainer, rank, PLAN, 1)
    trainer.save(folder)
    score(other)  # what was gathered for this must not survive the load
    other.load(folder)
    return largest_difference(weights_of(trainer), weights_of(other)), largest_difference(score(trainer), score(other))


def test_an_untied_head_is_saved_and_loaded_too(
    two_ranks: RankPool, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    assert two_ranks.run(save_and_load, tiny_models["llama"], tmp_path / "checkpoint") == [(0.0, 0.0)] * 2


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


def save_on_a_full_disk(rank: int, num_ranks: int, model: Path, folder: Path) -> tuple[str, float]:
    """Rank 1's files cannot grow beyond a few blocks, as on a disk that fills up while it writes."""
    trainer = build_olmo_core(rank, num_ranks, model)
    before = weights_of(trainer)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        trainer.save(folder / "full")
    except StorageError as error:
        message = str(error)
    else:
        message = "saved"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    trainer.save(folder / "roomy")
    return message, largest_difference(weights_of(trainer), before)


def test_a_full_disk_is_named_on_every_rank_and_costs_nothing_else(
    two_ranks: RankPool, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    for message, change in two_ranks.run(save_on_a_full_disk, tiny_models["qwen3_tied"], tmp_path):
        assert message.startswith(f"cannot write {tmp_path / 'full'}: rank 1: OSError: [Errno 27] File too large: ")
        assert message.endswith("remove old runs, or point storage.root to a disk with room")
        assert change == 0
    assert (tmp_path / "roomy" / "trainer.json").is_file()
    assert not (tmp_path / "full" / "trainer.json").exists()


def load_a_cut_off_checkpoint(rank: int, num_ranks: int, model: Path, checkpoint: Path) -> str:
    trainer = build_olmo_core(rank, num_ranks, model)
    try:
        trainer.load(checkpoint)
    except DataError as error:
        return str(error)
    return "loaded"


def test_a_cut_off_checkpoint_is_refused(
    two_ranks: RankPool, tiny_models: dict[str, Path], saved: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    shutil.copytree(saved[0] / "v2", tmp_path / "cut")
    files = sorted((tmp_path / "cut" / "state").glob("*.distcp"))
    assert files
    for file in files:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    for message in two_ranks.run(load_a_cut_off_checkpoint, tiny_models["qwen3_tied"], tmp_path / "cut"):
        assert f"{tmp_path / 'cut' / 'state'} cannot be read: rank " in message
        assert message.endswith("use an earlier checkpoint")


def train_and_export(rank: int, num_ranks: int, model: Path, folder: Path, dtype: str) -> dict[str, np.ndarray]:
    trainer = build_olmo_core(rank, num_ranks, model, dtype=dtype)
    train(trainer, rank, PLAN, 1)
    export_hf(trainer, folder, source=model, dtype=dtype)
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
