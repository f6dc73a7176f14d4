"""Random models: the folder is complete, repeats, and predicts as sharply as it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from grpo_lib.cli import main
from grpo_lib.data.chat import PromptEncoder, load_tokenizer, stop_token_ids
from grpo_lib.data.models import inspect_model, needed_tensors, read_model_config
from grpo_lib.errors import DataError
from grpo_lib.stages import make_model

SMALL = {"vocab_size": 3000, "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


def shape_folder(root: Path, family: str, **changes: object) -> Path:
    """A folder with nothing but a small config.json of a family."""
    name = {"qwen3": "qwen3_0_6b", "llama": "smollm2_135m", "olmo2": "olmo2_1b"}[family]
    heads = HEADS if family == "qwen3" else {**HEADS, "head_dim": 16}
    root.mkdir()
    (root / "config.json").write_text(json.dumps({**make_model.SHAPES[name], **SMALL, **heads, **changes}))
    return root


def entropies(folder: Path, seed: int) -> torch.Tensor:
    """Of transformers' own forward of the whole model, after tokens that the maker has not seen."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.config.vocab_size, (48, 16), generator=generator)
    with torch.no_grad():
        logprobs = model(tokens, use_cache=False).logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1).flatten()


@pytest.mark.parametrize("family", ["qwen3", "llama", "olmo2"])
def test_the_whole_model_has_the_promised_entropy(family: str, tmp_path: Path) -> None:
    made = make_model.run(str(shape_folder(tmp_path / "shape", family)), tmp_path / "out", seed=3, device="cpu")
    found = entropies(tmp_path / "out", seed=99)
    assert 2.0 < found.mean().item() < 3.0
    assert abs(found.mean().item() - made.predictions.entropy_mean) < 0.4
    assert made.predictions.entropy_p05 < 2.0 < made.predictions.entropy_p95
    assert 0.001 < made.predictions.tail_mean < 0.4, "beyond the 100 likeliest tokens something is left"
    facts = inspect_model(tmp_path / "out")
    assert facts.num_parameters == made.num_parameters
    assert facts.dtypes == ("BF16",)


def test_equal_seeds_give_equal_bytes_and_others_do_not(tmp_path: Path) -> None:
    shape = str(shape_folder(tmp_path / "shape", "qwen3"))
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_model.run(shape, tmp_path / name, seed=seed, device="cpu")
    first, again, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert first == again
    assert first != other


def test_files_are_bounded_and_hold_what_the_sample_ran_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers are drawn and dropped one by one; the folder's own forward must find the hidden states they gave."""
    monkeypatch.setattr(make_model, "_FILE_BYTES", 200_000)
    shape = shape_folder(tmp_path / "shape", "llama", tie_word_embeddings=False)
    made = make_model.run(str(shape), tmp_path / "out", dtype="float32", device="cpu")
    assert made.num_files > 3
    assert made.num_files == len(list((tmp_path / "out").glob("*.safetensors")))
    assert not list(tmp_path.glob(".out*")), "no scratch folder is left"
    assert abs(entropies(tmp_path / "out", seed=5).mean().item() - made.predictions.entropy_mean) < 0.4
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == needed_tensors(inspect_model(tmp_path / "out")).keys()
    with safe_open(tmp_path / "out" / index["model.norm.weight"], framework="pt") as file:
        gain = file.get_tensor("model.norm.weight")
    assert gain.eq(made.final_norm_gain).all()


def test_the_tokenizer_fits_the_vocabulary_and_serves_the_data_stage(tmp_path: Path) -> None:
    make_model.run(str(shape_folder(tmp_path / "shape", "qwen3")), tmp_path / "out", device="cpu")
    tokenizer = load_tokenizer(tmp_path / "out")
    encoded = PromptEncoder(tokenizer, "tokenizer").encode("7+8= é")
    assert 0 <= min(encoded.token_ids) <= max(encoded.token_ids) < 264 <= SMALL["vocab_size"]
    assert tokenizer.decode(tokenizer.encode("7+8= é", add_special_tokens=False)) == "7+8= é"
    assert stop_token_ids(tmp_path / "out", tokenizer) == (1,)
    assert tokenizer.model_max_length == make_model.SHAPES["qwen3_0_6b"]["max_position_embeddings"]


def test_a_folders_own_tokenizer_is_kept(tmp_path: Path) -> None:
    make_model.run("builtin:tiny_qwen3", tmp_path / "out", device="cpu")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["eos_token_id"], config["dtype"]) == (1, "bfloat16")
    assert load_tokenizer(tmp_path / "out").model_max_length == 256


def test_every_named_shape_is_one_the_trainers_know(tmp_path: Path) -> None:
    counts = {}
    for name in make_model.SHAPES:
        make_model._write_companions(name, tmp_path / name)
        shapes = needed_tensors(read_model_config(tmp_path / name / "config.json"))
        counts[name] = sum(torch.Size(shape).numel() for shape in shapes.values())
    assert {name: round(count / 1e6) for name, count in counts.items()} == {
        "qwen3_0_6b": 596,
        "qwen3_1_7b": 1721,
        "qwen3_4b": 4022,
        "qwen3_8b": 8191,
        "smollm2_135m": 135,
        "olmo2_1b": 1485,
    }


@pytest.mark.parametrize(
    ("like", "message"),
    [("qwen9", "neither a shape .qwen3_0_6b"), ("./nowhere", "neither a shape")],
)
def test_an_unknown_shape_is_refused(like: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match=message):
        make_model.run(like, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_there_already_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(DataError, match="exists already"):
        make_model.run("builtin:tiny_qwen3", tmp_path / "out")


def test_a_vocabulary_without_room_for_the_tokenizer_is_refused(tmp_path: Path) -> None:
    shape = shape_folder(tmp_path / "shape", "qwen3", vocab_size=200)
    with pytest.raises(DataError, match="vocab_size 200 is below the 264 ids"):
        make_model.run(str(shape), tmp_path / "out")


def test_the_command_prints_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = shape_folder(tmp_path / "shape", "qwen3")
    assert main(["make-model", "--like", str(shape), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    printed = capsys.readouterr().out
    assert "next-token entropy 2." in printed or "next-token entropy 3." in printed
    assert f"{tmp_path / 'out'}: " in printed
    assert main(["make-model", "--like", str(shape), str(tmp_path / "out")]) == 2
