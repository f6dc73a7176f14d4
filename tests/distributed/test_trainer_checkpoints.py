"""Every trainer saves, resumes on any number of ranks, and exports.

Functions whose name does not start with `test_` run in the ranks.
"""

from __future__ import annotations

import json
import re
import resource
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from grpo_lib.data.files import sha256_of
from grpo_lib.errors import DataError, StorageError
from grpo_lib.trainers.checkpoint_folder import WriteBehind
from grpo_lib.trainers.whole_model import export_hf
from grpo_lib.types import TRAINING_STATE, Bucket, StateKind, WrittenFile
from tests.distributed.gloo_ranks import RankPool
from tests.distributed.trainer_cases import (
    BACKENDS,
    OLMO_CORE,
    ONE_RANK_PLAN,
    PLAN,
    ZERO,
    BackendCase,
    each_backend,
    each_bf16_backend,
    hf_scores,
    largest_difference,
    save,
    score,
    state_of,
    train,
    weights_of,
)


def train_and_save(rank: int, num_ranks: int, case: BackendCase, model: Path, folder: Path) -> tuple[Any, list[Any]]:
    plan = PLAN if num_ranks == 2 else ONE_RANK_PLAN
    trainer = case.build(rank, num_ranks, model)
    save(trainer, folder / "v0")
    train(trainer, rank, plan, 2)
    save(trainer, folder / "v2")
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


EVERY_CASE = (OLMO_CORE, *ZERO)


def save_states(rank: int, num_ranks: int, model: Path, folder: Path) -> dict[str, Any]:
    """Every backend and ZeRO stage trains and saves; the state by folder, for rank 0 to show."""
    states = {}
    for case in EVERY_CASE:
        trainer = case.build(rank, num_ranks, model)
        train(trainer, rank, PLAN if num_ranks == 2 else ONE_RANK_PLAN, 2)
        name = f"{case.name}-{num_ranks}"
        save(trainer, folder / name)
        states[name] = {kind: state_of(trainer, kind) for kind in TRAINING_STATE}
    return states


def load_states(rank: int, num_ranks: int, case: BackendCase, model: Path, folder: Path, names: list[str]) -> list[Any]:
    """The state, and what the engine would be sent, after each of the checkpoints."""
    trainer = case.build(rank, num_ranks, model)
    loaded = []
    for name in names:
        trainer.load(folder / name)
        assert trainer.policy_version == 2
        loaded.append(({kind: state_of(trainer, kind) for kind in TRAINING_STATE}, weights_of(trainer)))
    return loaded


def test_any_ranks_of_any_backend_read_what_any_wrote(
    one_rank: RankPool, two_ranks: RankPool, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """From one rank to two and back, between all ZeRO stages and OLMo-core, bit for bit; an odd number of rows too."""
    model = tiny_models["olmo2"]
    saved = one_rank.run(save_states, model, tmp_path)[0] | two_ranks.run(save_states, model, tmp_path)[0]
    names = sorted(saved)
    assert len(names) == 2 * len(EVERY_CASE)
    for ranks in (one_rank, two_ranks):
        for case in EVERY_CASE:
            for own in ranks.run(load_states, case, model, tmp_path, names):
                for name, (state, sent) in zip(names, own, strict=True):
                    for kind in TRAINING_STATE:
                        assert largest_difference(state[kind], saved[name][kind]) == 0, (case.name, name, kind)
                    assert largest_difference(sent, saved[name][StateKind.WEIGHT]) == 0, (case.name, name)


def save_and_load(rank: int, num_ranks: int, case: BackendCase, model: Path, folder: Path) -> tuple[float, float]:
    trainer, other = (case.build(rank, num_ranks, model) for _ in range(2))
    train(trainer, rank, PLAN, 1)
    save(trainer, folder)
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
        lambda: save(trainer, folder / "v2"),
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
        assert "rank0.safetensors is missing" in missing
        assert "already holds a checkpoint" in taken


def write_behind_on_a_full_disk(
    rank: int, num_ranks: int, case: BackendCase, model: Path, folder: Path
) -> tuple[str, bool, float]:
    """Rank 1's files cannot grow beyond a few blocks, as on a disk that fills up while it writes."""
    trainer, writer = case.build(rank, num_ranks, model), WriteBehind()
    before = weights_of(trainer)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        writer.begin(folder / "full", trainer.snapshot)
        writer.written(wait=True)
    except StorageError as error:
        message = str(error)
    else:
        message = "written"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    writer.begin(folder / "roomy", trainer.snapshot)
    is_whole = writer.written(wait=True) is not None
    writer.close()
    return message, is_whole, largest_difference(weights_of(trainer), before)


@each_backend
def test_a_full_disk_is_named_by_the_rank_that_met_it_and_costs_nothing_else(
    two_ranks: RankPool, tiny_models: dict[str, Path], tmp_path: Path, case: BackendCase
) -> None:
    for name in ("full", "roomy"):
        (tmp_path / name).mkdir()
    (first, *_), (second, *_) = outcomes = two_ranks.run(
        write_behind_on_a_full_disk, case, tiny_models["qwen3_tied"], tmp_path
    )
    assert first == "written"
    assert second.startswith(f"cannot write {tmp_path / 'full'}: ")
    assert "File too large" in second
    assert second.endswith("remove old runs, or point storage.root to a disk with room")
    assert [outcome[1:] for outcome in outcomes] == [(True, 0.0)] * 2
    assert sorted(file.name for file in (tmp_path / "roomy").iterdir()) == ["rank0.safetensors", "rank1.safetensors"]


def train_while_writing(rank: int, num_ranks: int, case: BackendCase, model: Path, folder: Path) -> Any:
    """The thread gets the snapshot only after the next step is over: what it writes must not have moved with it."""
    trainer, writer = case.build(rank, num_ranks, model), WriteBehind()
    train(trainer, rank, PLAN, 1)
    expected = {kind: state_of(trainer, kind) for kind in TRAINING_STATE}
    go_on = threading.Event()
    snapshot = trainer.snapshot()

    class Late:
        def write(self, path: Path) -> WrittenFile:
            go_on.wait()
            return snapshot.write(path)

    writer.begin(folder, Late)
    train(trainer, rank, PLAN, 1)
    assert writer.written(wait=False) is None
    assert largest_difference(weights_of(trainer), expected[StateKind.WEIGHT]) > 0, "the step must move something"
    go_on.set()
    file = writer.written(wait=True)
    assert file == writer.written(wait=False), "it is told as often as it is asked for"
    dist.barrier()
    trainer.load(folder)
    writer.close()
    return expected, {kind: state_of(trainer, kind) for kind in TRAINING_STATE}, trainer.policy_version, file


@each_backend
def test_what_is_written_behind_is_the_state_of_the_snapshot(
    two_ranks: RankPool, tiny_models: dict[str, Path], tmp_path: Path, case: BackendCase
) -> None:
    outcomes = two_ranks.run(train_while_writing, case, tiny_models["qwen3_tied"], tmp_path)
    for expected, loaded, version, file in outcomes:
        assert version == 1
        assert all(largest_difference(loaded[kind], expected[kind]) == 0 for kind in TRAINING_STATE)
        written = tmp_path / file.name
        assert (file.size_bytes, file.sha256) == (written.stat().st_size, sha256_of(written))


def load_a_damaged_checkpoint(rank: int, num_ranks: int, case: BackendCase, model: Path, checkpoint: Path) -> str:
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
    files = list((tmp_path / "cut").iterdir())
    assert len(files) == 2, "one from each rank"
    for file in files:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    for message in two_ranks.run(load_a_damaged_checkpoint, saved.case, tiny_models["qwen3_tied"], tmp_path / "cut"):
        assert f"{tmp_path / 'cut'} cannot be read: " in message
        assert message.endswith("use an earlier checkpoint")


def test_files_of_two_checkpoints_are_not_mixed(
    two_ranks: RankPool, tiny_models: dict[str, Path], saved: Saved, tmp_path: Path
) -> None:
    shutil.copytree(saved.folder / "v2", tmp_path / "mixed")
    shutil.copy(saved.folder / "v0" / "rank1.safetensors", tmp_path / "mixed")
    for message in two_ranks.run(load_a_damaged_checkpoint, saved.case, tiny_models["qwen3_tied"], tmp_path / "mixed"):
        assert "rank1.safetensors is of another checkpoint than rank 0's: its policy_version is 0, not 2" in message


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


def export_with_a_broken_gather(
    rank: int, num_ranks: int, case: BackendCase, model: Path, folder: Path
) -> tuple[str, list[str]]:
    """The last bucket never arrives; what is on the disk just before is looked at."""
    trainer = case.build(rank, num_ranks, model)
    seen: list[str] = []

    class Broken:
        manifest = staticmethod(trainer.manifest)

        def named_weights(self) -> Iterator[Bucket]:
            *first, _ = trainer.named_weights()
            yield from first
            seen.extend(path.name for path in folder.parent.iterdir())
            raise ConnectionError("connection closed by peer")

    try:
        export_hf(cast(Any, Broken()), folder, source=model, dtype="float32")
    except ConnectionError as error:
        return str(error), seen
    return "exported", seen


def test_an_export_that_breaks_off_leaves_no_folder(
    one_rank: RankPool, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    ((message, seen),) = one_rank.run(export_with_a_broken_gather, OLMO_CORE, tiny_models["olmo2"], tmp_path / "out")
    assert message == "connection closed by peer"
    (scratch,) = seen
    assert scratch.startswith(".out.")
    assert list(tmp_path.iterdir()) == []


@each_bf16_backend
def test_an_export_in_another_dtype_says_so(
    two_ranks: RankPool, tiny_models: dict[str, Path], tmp_path: Path, case: BackendCase
) -> None:
    two_ranks.run(train_and_export, case, tiny_models["qwen3"], tmp_path / "out", "bfloat16")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
