import json
import shutil
import struct
from pathlib import Path

import pytest

from grpo_lib.data.models import inspect_model, needed_tensors, read_tensor_headers, resolve_model_path
from grpo_lib.errors import DataError
from tests.tiny_models import FAMILIES, make_tiny_model

TINY = resolve_model_path("builtin:tiny_qwen3")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the shipped model to damage."""
    return Path(shutil.copytree(TINY, tmp_path / "model"))


def write_safetensors(path: Path, shapes: dict[str, list[int]]) -> None:
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 4
        for dim in shape:
            size *= dim
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(offset))


def edit_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def shards_of(folder: Path) -> dict[str, list[int]]:
    return {name: list(header.shape) for name, header in read_tensor_headers(folder).items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_needed_tensors_are_those_of_hugging_face(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = make_tiny_model(tmp_path, family)
    parameters = dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
    facts = inspect_model(path)
    assert needed_tensors(facts) == {name: tuple(value.shape) for name, value in parameters.items()}
    assert facts.num_parameters == sum(value.numel() for value in parameters.values())


def test_sharded_folder_is_read_through_its_index(folder: Path) -> None:
    before, shapes = inspect_model(folder), shards_of(folder)
    names = list(shapes)
    homes = {name: f"model-{1 + (i > 9)}.safetensors" for i, name in enumerate(names)}
    for home in set(homes.values()):
        write_safetensors(folder / home, {name: shapes[name] for name in names if homes[name] == home})
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": homes}))
    assert inspect_model(folder) == before

    index.write_text(json.dumps({"weight_map": {**homes, "model.layers.9.extra": "model-1.safetensors"}}))
    with pytest.raises(DataError, match=r"tensors that their files do not hold: model\.layers\.9\.extra"):
        inspect_model(folder)
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(DataError, match=r"files that are not there: model-2\.safetensors"):
        inspect_model(folder)
    index.write_text('{"weight_map": 3}')
    with pytest.raises(DataError, match="weight_map"):
        inspect_model(folder)


def test_missing_tensor_is_named(folder: Path) -> None:
    shapes = shards_of(folder)
    del shapes["model.layers.1.self_attn.k_proj.weight"]
    write_safetensors(folder / "model.safetensors", shapes)
    with pytest.raises(DataError, match=r"lacks 1 of 35 tensors: model\.layers\.1\.self_attn\.k_proj\.weight"):
        inspect_model(folder)


def test_wrong_shape_is_named(folder: Path) -> None:
    edit_config(folder, num_key_value_heads=1)
    with pytest.raises(DataError, match=r"k_proj\.weight is \[128, 64\] instead of \[64, 64\]"):
        inspect_model(folder)


def test_untied_head_is_needed(folder: Path) -> None:
    edit_config(folder, tie_word_embeddings=False)
    with pytest.raises(DataError, match=r"lm_head\.weight"):
        inspect_model(folder)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; it must be one of llama, olmo2, qwen3"),
        ({"model_type": None}, "model_type None is not supported"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) is not a multiple of num_key_value_heads \(3\)"),
    ],
)
def test_config_mistakes(folder: Path, values: dict[str, object], message: str) -> None:
    edit_config(folder, **values)
    with pytest.raises(DataError, match=message):
        inspect_model(folder)


def test_damaged_files(folder: Path) -> None:
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=f"cut off: {len(whole) - 1:,} of {len(whole):,} bytes"):
        inspect_model(folder)
    weights.write_bytes(whole[:5])
    with pytest.raises(DataError, match="not a safetensors file"):
        inspect_model(folder)
    weights.write_bytes(whole[:8] + b"[" + whole[9:])
    with pytest.raises(DataError, match="header is damaged"):
        inspect_model(folder)
    weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(DataError, match="not a safetensors file"):
        inspect_model(folder)
    weights.unlink()
    with pytest.raises(DataError, match=r"no \*\.safetensors file"):
        inspect_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(DataError, match="not JSON"):
        inspect_model(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(DataError, match="expected an object"):
        inspect_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(DataError, match=r"has no config\.json"):
        inspect_model(folder)
    with pytest.raises(DataError, match="does not exist"):
        inspect_model(folder / "nowhere")


def test_resolving(folder: Path) -> None:
    assert resolve_model_path(str(folder)) == folder.resolve()
    assert (TINY / "config.json").is_file()
    with pytest.raises(DataError, match="there are builtin:tiny_qwen3"):
        resolve_model_path("builtin:tiny_qwen")
    with pytest.raises(DataError, match="no built-in model"):
        resolve_model_path("builtin:../data")
    for path in ("", "./nowhere", "/nowhere", "~/nowhere", "a/b/c"):
        with pytest.raises(DataError, match="does not exist"):
            resolve_model_path(path)


def test_hub_name_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DataError, match="neither a folder here nor in the hub's cache"):
        resolve_model_path("someone/some-model")
    with pytest.raises(DataError, match="nor a valid hub name"):
        resolve_model_path("some one/model")
