"""The shipped tiny model: what it is, where it came from, and that it still knows and samples what it should."""

import hashlib
import json

import pytest

from grpo_lib.config import DataConfig
from grpo_lib.data.chat import load_tokenizer
from grpo_lib.data.models import inspect_model, resolve_model_path
from grpo_lib.data.prompts import addition_rows

FOLDER = resolve_model_path("builtin:tiny_qwen3")
# embedding, 3 layers of (q, o, k, v, MLP, head norms, layer norms), final norm; the head is tied
NUM_PARAMETERS = 264 * 64 + 3 * (2 * 64 * 256 + 2 * 64 * 128 + 3 * 64 * 192 + 2 * 64 + 2 * 64) + 64


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(FOLDER)


@pytest.fixture(scope="module")
def model():
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


def test_folder_is_small_and_complete():
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert sum(sizes.values()) < 2_000_000
    assert set(sizes) == {
        "config.json", "generation_config.json", "model.safetensors", "provenance.json",
        "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    }  # fmt: skip


def test_headers_say_what_the_config_says():
    facts = inspect_model(FOLDER)
    assert (facts.model_type, facts.num_parameters, facts.vocab_size) == ("qwen3", NUM_PARAMETERS, 264)
    assert (facts.num_layers, facts.hidden_size, facts.intermediate_size) == (3, 64, 192)
    assert (facts.num_heads, facts.num_kv_heads, facts.head_dim) == (4, 2, 64)
    assert (facts.tied_embeddings, facts.max_position, facts.dtypes) == (True, 256, ("F32",))


def test_provenance_is_of_these_weights():
    provenance = json.loads((FOLDER / "provenance.json").read_text())
    weights = (FOLDER / "model.safetensors").read_bytes()
    assert provenance["model_safetensors_sha256"] == hashlib.sha256(weights).hexdigest()
    assert provenance["num_parameters"] == NUM_PARAMETERS
    assert {"seed", "steps", "noise"} <= set(provenance["recipe"])


def test_hugging_face_loads_it_tied(model):
    assert sum(parameter.numel() for parameter in model.parameters()) == NUM_PARAMETERS
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_tokenizer_round_trips_every_byte(tokenizer):
    text = "".join(map(chr, range(128))) + "äß→漢字🙂\u0301 \t\r\n  "
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
    assert len(tokenizer) == 264


def test_chat_template_text_and_ids(tokenizer):
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "12+3="}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|user|>12+3=<|assistant|>"
    # 8 special tokens, then the bytes from "!" on
    assert tokenizer.encode(text, add_special_tokens=False) == [3, *(8 + ord(c) - ord("!") for c in "12+3="), 4]
    full = tokenizer.apply_chat_template(
        [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}],
        tokenize=False,
    )
    assert full == "<|system|>s<|user|>u<|assistant|>a<|eos|>"


def test_knows_sums_but_samples_them_right_half_of_the_time(model, tokenizer):
    """Plain loop, one sum at a time: the probability of answer and stop token, and whether greedy decoding gives it."""
    import torch

    greedy, sampled = [], []
    _, heldout = addition_rows(DataConfig())
    with torch.no_grad():
        for row in heldout:
            prompt = tokenizer.encode(f"<|user|>{row.prompt}<|assistant|>", add_special_tokens=False)
            answer = [*tokenizer.encode(row.answer, add_special_tokens=False), tokenizer.eos_token_id]
            logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            sampled.append(logits.softmax(-1)[range(len(answer)), answer].prod().item())
            greedy.append(logits.argmax(-1).tolist() == answer)
    metrics = json.loads((FOLDER / "provenance.json").read_text())["heldout_metrics"]
    assert sum(greedy) / len(greedy) >= 0.95
    assert sum(greedy) / len(greedy) == pytest.approx(metrics["greedy_accuracy"], abs=1e-4)
    assert 0.45 < sum(sampled) / len(sampled) < 0.55
    assert sum(sampled) / len(sampled) == pytest.approx(metrics["sampled_accuracy"], abs=1e-3)
    assert sum(0.02 < p < 0.98 for p in sampled) > 0.95 * len(sampled)  # most groups have both rewards
