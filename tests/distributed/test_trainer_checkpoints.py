"""Every trainer saves, resumes on any number of ranks, and exports.

Functions whose name does not start with `test_` run in the ranks.
"""

from __future__ import annotations

import json
import re
import resource
import shutil
from dataclasses import dataclass
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
    BACKENDS,
    ONE_RANK_PLAN,
    PLAN,
    BackendCase,
    each_backend,
    each_bf16_backend,
    hf_scores,
    largest_difference,
    score,
    train,
    weights_of,
)


def train_and_save(rank: int, num_ranks: int, case: BackendCase, model: Path, folder: Path) -> tuple[Any, list[Any]]:
    plan = PLAN if num_ranks == 2 else ONE_RANK_PLAN
    trainer = case.build(rank, num_ranks, model)
    trainer.save(folder / "v0")
    train(trainer, rank, plan, 2)
    trainer.save(folder / "v2")
    rng = torch.rand(3).numpy()
    steps = train(trainer, rank, plan, 2)
    return weights_of(trainer), [steps, trainer.policy_version, rng]


def train_without_saving(rank: int, num_ranks: int, case: BackendCase, model: Path) -> Any:
    trainer = case.build(rank, num_ranks, model)
    train(trainer, rank, PLAN if num_ranks == 2 else ONE_RANK_PLAN, 4)
    return weights_of(trainer)


def resume(rank: int, num_ranks: int, case: BackendCase, model: Path, checkpoint: Path) -> tuple[Any, list[Any]]:
    plan = PLAN if num_ranks == 2 else ONE_RANK_PLAN
    trainer = case.build(rank, num_ranks, model)
    torch.manual_seed(99)
    trainer.load(checkpoint)
    rng = torch.rand(3).numpy()
    assert trainer.policy_version == 2
    steps = train(trainer, rank, plan, 2)
    return weights_of(trainer), [steps, trainer.policy_version, rng]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Checkpoints that two ranks of a backend wrote, and how those ranks went on."""

    case: BackendCase
    folder: Path
    outcomes: list[Any]  # by rank, of `train_and_save`


@pytest.fixture(scope="module", params=BACKENDS, ids=lambda case: case.name)
def saved(
    request: pytest.FixtureRequest,
    two_ranks: RankPool,
    tiny_models: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Saved:
    folder = tmp_path_factory.mktemp("checkpoints")
    outcomes = two_ranks.run(train_and_save, request.param, tiny_models["qwen3_tied"], folder)
    return Saved(case=request.param, folder=folder, outcomes=outcomes)


def test_resume_on_as_many_ranks_is_exact(two_ranks: RankPool, tiny_models: dict[str, Path], saved: Saved) -> None:
    """Weights, metrics, learning rates, version and generator state continue bit for bit."""
    resumed = two_ranks.run(resume, saved.case, tiny_models["qwen3_tied"], saved.folder / "v2")
    for (weights, (steps, version, rng)), (expected, (expected_steps, expected_version, expected_rng)) in zip(
        resumed, saved.outcomes, strict=True
    ):
        assert largest_difference(weights, expected) == 0
        assert steps == expected_steps
        assert version == expected_version == 4
        np.testing.assert_array_equal(rng, expected_rng)


def test_resume_on_fewer_ranks_is_equal_to_rounding(
    one_rank: RankPool, tiny_models: dict[str, Path], saved: Saved
) -> None:
    ((weights, (steps, version, _)),) = one_rank.run(resume, saved.case, tiny_models["qwen3_tied"], saved.folder / "v2")
    expected, (expected_steps, _, _) = saved.outcomes[0]
    assert version == 4
    assert [s["optim/lr"] for s in steps] == [s["optim/lr"] for s in expected_steps]
    for name, values in expected.items():
        assert np.abs(weights[name] - values).max() <= 1e-5 * np.abs(values).max(), name


def test_saving_changes_nothing(two_ranks: RankPool, tiny_models: dict[str, Path], saved: Saved) -> None:
    """PyTorch fills in missing optimiser state by a step that counts; a save before the first step must not."""
    unsaved = two_ranks.run(train_without_saving, saved.case, tiny_models["qwen3_tied"])
    assert largest_difference(unsaved[0], saved.outcomes[0][0]) == 0


def resume_once(rank: int, num_ranks: int, case: BackendCase, model: Path, checkpoint: Path) -> dict[str, np.ndarray]:
    trainer = case.build(rank, num_ranks, model)
    trainer.load(checkpoint)
    return weights_of(trainer)


@each_backend
def test_two_ranks_read_what_one_wrote(
    one_rank: RankPool, two_ranks: RankPool, tiny_models: dict[str, Path], tmp_path: Path, case: BackendCase
) -> None:
    one_rank.run(train_and_save, case, tiny_models["olmo2"], tmp_path)
    (alone,) = one_rank.run(resume_once, case, tiny_models["olmo2"], tmp_path / "v2")
    for together in two_ranks.run(resume_once, case, tiny_models["olmo2"], tmp_path / "v2"):
        assert largest_difference(together, alone) == 0


def save_and_load(rank: int, num_ranks: int, case: BackendCase, model: Path, folder: Path) -> tuple[float, float]:
    trainer, other = (case.build(rank, num_ranks, model) for _ in range(2))
    train(trainer, rank, PLAN, 1)
    trainer.save(folder)
    score(other)  # what was gathered for this must not survive the load
    other.load(folder)
    return largest_difference(weights_of(trainer), weights_of(other)), largest_difference(score(trainer), score(other))


@each_backend
def test_an_untied_head_is_saved_and_loaded_too(
    two_ranks: RankPool, tiny_models: dict[str, Path], tmp_path: Path, case: BackendCase
) -> None:
    assert two_ranks.run(save_and_load, case, tiny_models["llama"], tmp_path / "checkpoint") == [(0.0, 0.0)] * 2


def load_errors(rank: int, num_ranks: int, case: BackendCase, model: Path, other: Path, folder: Path) -> list[str]:
    messages = []
    trainer, stranger = (case.build(rank, num_ranks, path) for path in (model, other))
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
    two_ranks: RankPool, tiny_models: dict[str, Path], saved: Saved
) -> None:
    for other_model, missing, taken in two_ranks.run(
        load_errors, saved.case, tiny_models["qwen3_tied"], tiny_models["llama"], saved.folder
    ):
        assert re.search(r"tensor '[\w.]+' has shape .+ in the checkpoint and .+ in the model", other_model)
        assert other_model.endswith("it was saved by a run of another model")
        assert "trainer.json is missing" in missing
        assert "already holds a checkpoint" in taken


def save_on_a_full_disk(rank: int, num_ranks: int, case: BackendCase, model: Path, folder: Path) -> tuple[str, float]:
    """Rank 1's files cannot grow beyond a few blocks, as on a disk that fills up while it writes."""
    trainer = case.build(rank, num_ranks, model)
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


@each_backend
def test_a_full_disk_is_named_on_every_rank_and_costs_nothing_else(
    two_ranks: RankPool, tiny_models: dict[str, Path], tmp_path: Path, case: BackendCase
) -> None:
    for message, change in two_ranks.run(save_on_a_full_disk, case, tiny_models["qwen3_tied"], tmp_path):
        assert message.startswith(f"cannot write {tmp_path / 'full'}: rank 1: ")
        assert "File too large" in message
        assert message.endswith("remove old runs, or point storage.root to a disk with room")
        assert change == 0
    assert (tmp_path / "roomy" / "trainer.json").is_file()
    assert not (tmp_path / "full" / "trainer.json").exists()


def load_a_cut_off_checkpoint(rank: int, num_ranks: int, case: BackendCase, model: Path, checkpoint: Path) -> str:
    trainer = case.build(rank, num_ranks, model)
    try:
        trainer.load(checkpoint)
    except DataError as error:
        return str(error)
    return "loaded"


def test_a_cut_off_checkpoint_is_refused(
    two_ranks: RankPool, tiny_models: dict[str, Path], saved: Saved, tmp_path: Path
) -> None:
    shutil.copytree(saved.folder / "v2", tmp_path / "cut")
    files = [file for file in (tmp_path / "cut" / "state").iterdir() if file.name != ".metadata"]
    assert len(files) >= 2, "one from each rank"
    for file in files:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    for message in two_ranks.run(load_a_cut_off_checkpoint, saved.case, tiny_models["qwen3_tied"], tmp_path / "cut"):
        assert f"{tmp_path / 'cut' / 'state'} cannot be read: " in message
        assert message.endswith("use an earlier checkpoint")


def train_and_export(
    rank: int, num_ranks: int, case: BackendCase, model: Path, folder: Path, dtype: str
) -> dict[str, np.ndarray]:
    trainer = case.build(rank, num_ranks, model, dtype=dtype)
    train(trainer, rank, PLAN, 1)
    export_hf(trainer, folder, source=model, dtype=dtype)
    return score(trainer)


@pytest.mark.parametrize("family", ["qwen3_tied", "olmo2"])
@each_backend
def test_an_export_loads_in_transformers_and_scores_the_same(
    two_ranks: RankPool, tiny_models: dict[str, Path], tmp_path: Path, case: BackendCase, family: str
) -> None:
    source = tiny_models[family]
    scores = two_ranks.run(train_and_export, case, source, tmp_path / "out", "float32")[0]
    assert largest_difference(scores, hf_scores(tmp_path / "out", torch.float32)) <= 1e-5
    assert largest_difference(scores, hf_scores(source, torch.float32)) > 1e-5, "the export must be the trained weights"
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()


@each_bf16_backend
def test_an_export_in_another_dtype_says_so(
    two_ranks: RankPool, tiny_models: dict[str, Path], tmp_path: Path, case: BackendCase
) -> None:
    two_ranks.run(train_and_export, case, tiny_models["qwen3"], tmp_path / "out", "bfloat16")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
