"""Tiny random Hugging Face models of the families that the trainers know, for tests on CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB = 96
PADDING_TOKEN = 2  # also the stop token
FAMILIES = ("qwen3_tied", "qwen3", "llama", "llama3", "olmo2")  # llama3: with that rotary scaling


def make_tiny_model(folder: Path, family: str, *, seed: int = 0) -> Path:
    """Write a model of ~60 k parameters with grouped query heads, and return its folder.

    Weights are larger than a fresh initialisation and norms are not 1, so that a wrong rounding order, a wrong norm or
    a missing boundary shows up in the logits.
    """
    model = _build(family)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.15 * noise if parameter.ndim > 1 else 1 + 0.1 * noise)
    model.save_pretrained(folder)
    return folder


def _build(family: str) -> Any:
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": PADDING_TOKEN,
        "pad_token_id": PADDING_TOKEN,
        "tie_word_embeddings": False,
    }
    if family == "qwen3_tied":
        return transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(**{**sizes, "head_dim": 16, "tie_word_embeddings": True})
        )
    if family == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, head_dim=16))
    if family == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    if family == "llama3":
        rope = {
            "rope_type": "llama3",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, rope_parameters=rope))
    if family == "olmo2":
        return transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**sizes))
    raise ValueError(f"no tiny model of family {family!r}; there are {FAMILIES}")
