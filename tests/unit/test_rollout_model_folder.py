"""A model folder is checked before an engine starts: complete, undamaged, and of the shapes its config describes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_lib.config import RolloutConfig
from grpo_lib.errors import DataError
from grpo_lib.rollout.model_folder import open_model_folder
from grpo_lib.rollout.vllm_engine import VllmEngine
from tests.tiny_models import VOCAB, make_tiny_model

K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tied", "qwen3_tied")


@pytest.fixture
def folder(untouched: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    copy = tmp_path / "model"
    copy.mkdir()
    for file in untouched.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Change tensors of the folder; None removes one. Keys have `__` for dots."""
    tensors = load_file(folder / "model.safetensors")
    for key, tensor in changes.items():
        name = key.replace("__", ".")
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_names_are_those_of_the_file_and_a_tied_head_is_not_one(folder: Path) -> None:
    opened = open_model_folder(folder)
    names = set(load_file(folder / "model.safetensors"))
    assert opened.tensor_shapes.keys() == names
    assert "lm_head.weight" not in names
    assert opened.tensor_shapes[K_PROJ] == (32, 32)
    assert (opened.vocab_size, opened.max_positions) == (VOCAB, 256)
    rewrite(folder, lm_head__weight=torch.zeros(VOCAB, 32))  # some savers write the tied copy too
    assert open_model_folder(folder).tensor_shapes.keys() == names


def test_an_untied_head_is_needed(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "untied", "qwen3")
    assert "lm_head.weight" in open_model_folder(folder).tensor_shapes
    rewrite(folder, lm_head__weight=None)
    with pytest.raises(DataError, match=r"lacks 1 of \d+ tensors: lm_head.weight"):
        open_model_folder(folder)


def test_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, model__layers__1__self_attn__k_proj__weight=None, model__norm__weight=None)
    with pytest.raises(DataError, match=f"lacks 2 of .*{K_PROJ}, model.norm.weight"):
        open_model_folder(folder)


def test_wrong_shape_is_named(folder: Path) -> None:
    rewrite(folder, model__norm__weight=torch.ones(31))
    with pytest.raises(DataError, match=r"model.norm.weight \(31,\) instead of \(32,\)"):
        open_model_folder(folder)


def test_folder_without_weights(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(DataError, match=r"no \*.safetensors file; other formats are not read"):
        open_model_folder(folder)
    (folder / "config.json").unlink()
    with pytest.raises(DataError, match=r"no config.json"):
        open_model_folder(folder)
    with pytest.raises(DataError, match="does not exist"):
        open_model_folder(tmp_path / "nowhere")


def test_cut_off_and_foreign_files(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(DataError, match="is cut off"):
        open_model_folder(folder)
    file.write_bytes(whole[:50])
    with pytest.raises(DataError, match="it is cut off at 50 bytes"):
        open_model_folder(folder)
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(DataError, match="is not a safetensors file"):
        open_model_folder(folder)
    file.write_bytes((4).to_bytes(8, "little") + b"nope" + b"\0" * 100)
    with pytest.raises(DataError, match="header is damaged"):
        open_model_folder(folder)


def test_sharded_folder_and_an_absent_shard(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    for index, part in enumerate((names[:5], names[5:])):
        save_file({name: tensors[name] for name in part}, folder / f"model-{index}.safetensors")
    weight_map = {name: f"model-{int(name in names[5:])}.safetensors" for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert open_model_folder(folder).tensor_shapes == {name: tuple(t.shape) for name, t in tensors.items()}
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(DataError, match=r"lists files that are not there: model-1.safetensors"):
        open_model_folder(folder)


def test_engine_refuses_a_bad_folder_and_too_long_sequences_before_vllm_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "VLLM_ENABLE_V1_MULTIPROCESSING", "TORCHDYNAMO_DISABLE"):
        monkeypatch.setenv(name, "1")  # the engine sets these; restored afterwards

    def engine(max_model_len: int) -> VllmEngine:
        return VllmEngine(
            model_path=folder,
            config=RolloutConfig(),
            dtype="float32",
            transfer_backend="cpu_gloo",
            max_model_len=max_model_len,
        )

    with pytest.raises(ValueError, match=r"need 257 positions, but .* has 256"):
        engine(257)
    rewrite(folder, model__norm__weight=None)
    with pytest.raises(DataError, match=r"lacks 1 of .*model.norm.weight"):
        engine(64)
