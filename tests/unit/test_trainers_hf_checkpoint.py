"""Model folders are read strictly, by name, and written so that other programs load them."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_lib.errors import DataError, StorageError
from grpo_lib.trainers import hf_checkpoint
from grpo_lib.trainers.hf_checkpoint import HfFolder, HfFolderWriter
from grpo_lib.types import WeightEntry, WeightManifest

SHAPES = {"a": (5, 3), "b": (4,)}


def make_folder(path: Path, **files: dict[str, torch.Tensor]) -> Path:
    """`config.json` and one safetensors file per keyword, `__` standing for a dash."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text('{"model_type": "llama", "dtype": "float32"}')
    for name, tensors in files.items():
        save_file(tensors, path / f"{name.replace('__', '-')}.safetensors")
    return path


def tensors() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(15.0).view(5, 3), "b": torch.arange(4.0)}


def test_tensors_and_rows_come_back(tmp_path: Path) -> None:
    folder = HfFolder(make_folder(tmp_path, model__1=tensors(), model__2={"c": torch.ones(2, dtype=torch.bfloat16)}))
    folder.check_tensors({**SHAPES, "c": (2,)})
    assert folder.names == {"a", "b", "c"}
    assert folder.shape("a") == (5, 3)
    assert torch.equal(folder.tensor("a"), tensors()["a"])
    assert torch.equal(folder.rows("a", 3, 5), tensors()["a"][3:5])
    assert folder.rows("b", 4, 4).shape == (0,)  # the empty shard of a small vector on many ranks


@pytest.mark.parametrize(("name", "start", "stop"), [("a", 0, 15), ("a", 4, 11), ("a", 3, 6), ("a", 7, 7), ("b", 1, 3)])
def test_any_run_of_elements_comes_back(tmp_path: Path, name: str, start: int, stop: int) -> None:
    """ZeRO cuts tensors without regard to their rows."""
    folder = HfFolder(make_folder(tmp_path, model=tensors()))
    assert torch.equal(folder.flat(name, start, stop), tensors()[name].flatten()[start:stop])


def test_a_tied_head_must_be_the_embedding_matrix(tmp_path: Path) -> None:
    embeddings = torch.arange(6.0).view(3, 2)
    HfFolder(make_folder(tmp_path / "copy", model={"e": embeddings, "h": embeddings.clone()})).check_tied_copy("h", "e")
    apart = HfFolder(make_folder(tmp_path / "apart", model={"e": embeddings, "h": embeddings + 1}))
    with pytest.raises(DataError, match=r"'h' differs from 'e', but config\.json says tie_word_embeddings"):
        apart.check_tied_copy("h", "e")


def test_only_the_indexed_files_are_read(tmp_path: Path) -> None:
    make_folder(tmp_path, model__1=tensors(), consolidated=tensors())
    (tmp_path / hf_checkpoint.INDEX).write_text(json.dumps({"weight_map": dict.fromkeys("ab", "model-1.safetensors")}))
    assert HfFolder(tmp_path).names == {"a", "b"}


def spoil(path: Path, how: str) -> Path:
    if how == "no folder":
        return path / "elsewhere"
    make_folder(path, model=tensors())
    if how == "no config":
        (path / "config.json").unlink()
    elif how == "broken config":
        (path / "config.json").write_text("{")
    elif how == "config is a list":
        (path / "config.json").write_text("[]")
    elif how == "no weights":
        (path / "model.safetensors").unlink()
    elif how == "only a pickle":
        (path / "model.safetensors").rename(path / "pytorch_model.bin")
    elif how == "truncated weights":
        (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:40])
    elif how == "indexed file missing":
        (path / hf_checkpoint.INDEX).write_text('{"weight_map": {"a": "model-1-of-2.safetensors"}}')
    elif how == "tensor twice":
        save_file({"b": torch.ones(4)}, path / "other.safetensors")
    return path


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no folder", "elsewhere does not exist"),
        ("no config", r"config\.json is missing"),
        ("broken config", r"config\.json is not valid JSON"),
        ("config is a list", "must hold a JSON object, not a list"),
        ("no weights", r"has no weights: no \*\.safetensors"),
        ("only a pickle", r"pytorch_model\.bin must be converted to safetensors"),
        ("truncated weights", r"model\.safetensors is not a readable safetensors file"),
        ("indexed file missing", r"lists \['model-1-of-2\.safetensors'\]"),
        ("tensor twice", r"tensor 'b' is in both model\.safetensors and other\.safetensors"),
    ],
)
def test_an_unusable_folder_is_named(tmp_path: Path, how: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        HfFolder(spoil(tmp_path, how))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": None}, "lacks 1 of 2 tensors, first 'b'"),
        ({"stray": torch.ones(1)}, r"model\.safetensors holds 1 tensors that a 'llama' model .* first 'stray'"),
        ({"b": torch.ones(5)}, r"tensor 'b' has shape \(5,\), config\.json asks for \(4,\)"),
        ({"b": torch.ones(4, dtype=torch.int8)}, "tensor 'b' is stored as I8; quantised weights"),
    ],
)
def test_a_wrong_tensor_is_named(tmp_path: Path, change: dict[str, torch.Tensor | None], message: str) -> None:
    content = {name: tensor for name, tensor in {**tensors(), **change}.items() if tensor is not None}
    with pytest.raises(DataError, match=message):
        HfFolder(make_folder(tmp_path, model=content)).check_tensors(SHAPES)


def write(path: Path, source: Path, content: dict[str, torch.Tensor], dtype: str = "float32", **options: int) -> None:
    entries = tuple(WeightEntry(name=name, dtype=dtype, shape=tuple(t.shape)) for name, t in content.items())
    manifest = WeightManifest(entries=entries)
    writer = HfFolderWriter(path, source=source, manifest=manifest, dtype=dtype, **options)
    for name, tensor in content.items():
        writer.add(name, tensor)
    writer.close(manifest)


def test_a_written_folder_reads_back_with_its_companions(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "source", model=tensors())
    (source / "tokenizer.json").write_text("tokens")
    (source / "README.md").write_text("about another checkpoint")
    write(tmp_path / "out", source, tensors())
    assert HfFolder(tmp_path / "out").names == {"a", "b"}
    assert torch.equal(HfFolder(tmp_path / "out").tensor("a"), tensors()["a"])
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "tokens"
    assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert not (tmp_path / "out" / "README.md").exists()


def test_large_models_are_split_over_files_with_an_index(tmp_path: Path) -> None:
    content = {name: torch.full((8,), float(index)) for index, name in enumerate("abcde")}  # 32 bytes each
    write(tmp_path / "out", make_folder(tmp_path / "source", model=tensors()), content, file_bytes=64)
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert load_file(tmp_path / "out" / files[1]).keys() == {"c", "d"}
    index = json.loads((tmp_path / "out" / hf_checkpoint.INDEX).read_text())
    assert index["metadata"]["total_size"] == 160
    assert HfFolder(tmp_path / "out").names == set("abcde")


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_config_states_the_dtype_that_was_written(tmp_path: Path, key: str) -> None:
    source = make_folder(tmp_path / "source", model=tensors())
    config: dict[str, Any] = {"model_type": "llama", key: "float32", "hidden_size": 3}
    (source / "config.json").write_text(json.dumps(config))
    write(tmp_path / "out", source, {n: t.bfloat16() for n, t in tensors().items()}, "bfloat16")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {**config, key: "bfloat16"}


@pytest.mark.parametrize("room_bytes", [0, 128])  # for no file at all, and for all but the weights
def test_a_full_disk_is_named_with_the_way_out(tmp_path: Path, room_bytes: int) -> None:
    """A limit on the size of files stands for the disk: its errors come from the same calls."""
    source = make_folder(tmp_path / "source", model=tensors())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, hard))
    try:
        with pytest.raises(StorageError, match=r"cannot write .*File too large.*storage\.root") as caught:
            write(tmp_path / "out", source, tensors())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert ("model.safetensors" in str(caught.value)) == (room_bytes > 0)
