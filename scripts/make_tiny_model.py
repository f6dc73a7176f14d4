"""Train the tiny byte-level Qwen3 that ships with the package: one command, seeded, about two minutes of one core.

    OMP_NUM_THREADS=1 python scripts/make_tiny_model.py

The model learns x + y by supervised learning on sums of which a known share is off by 1 or 10. It therefore *knows*
the answer (greedy decoding is nearly perfect) but *samples* it about half of the time, so that almost every group of
16 has both rewards and GRPO has something to sharpen from its first step. The held-out sums of the default `addition`
data are excluded from this training too.

The same versions, seed and instruction set give the same bytes; `provenance.json` records them and their metrics. The
script ends with an error, and writes nothing, when the model misses its targets.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import safetensors
import tokenizers
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from grpo_lib.config import DataConfig
from grpo_lib.data.prompts import PromptRow, addition_rows

DEFAULT_OUT = Path(__file__).resolve().parents[1] / "grpo_lib" / "models" / "tiny_qwen3"
SPECIAL_TOKENS = (
    "<|pad|>",
    "<|eos|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    *(f"<|reserved_{i}|>" for i in range(3)),
)
PAD_ID, EOS_ID = 0, 1
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
GROUP_SIZE = 16  # for the expected share of mixed groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Supervised training; `noise` is the share of training sums whose answer is off by 1 or 10."""

    seed: int
    steps: int
    batch_size: int
    learning_rate: float
    noise: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Held-out quality. `sampled_accuracy` is exact: the probability of the answer's tokens and the stop token."""

    greedy_accuracy: float
    sampled_accuracy: float
    mixed_groups: float  # expected share of groups of 16 with both rewards

    def problems(self) -> list[str]:
        checks = {
            f"greedy accuracy {self.greedy_accuracy:.3f} < 0.95": self.greedy_accuracy >= 0.95,
            f"sampled accuracy {self.sampled_accuracy:.3f} outside [0.45, 0.55]": 0.45 <= self.sampled_accuracy <= 0.55,
            f"mixed groups {self.mixed_groups:.3f} < 0.95": self.mixed_groups >= 0.95,
        }
        return [text for text, ok in checks.items() if not ok]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE without merges: 8 special tokens and the 256 bytes, so every text round-trips."""
    tokens = (*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()))
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=SPECIAL_TOKENS[PAD_ID],
        eos_token=SPECIAL_TOKENS[EOS_ID],
        extra_special_tokens=list(SPECIAL_TOKENS[2:]),
        padding_side="left",
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(vocab_size: int) -> Qwen3ForCausalLM:
    """Grouped-query attention with several groups, so that a wrong head order shows; head_dim 64 for GPU kernels."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return Qwen3ForCausalLM(config).float()


class Encoder:
    """Rows → padded (input_ids, labels); labels cover the answer and the stop token only."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._digit_ids = {digit: tokenizer.get_vocab()[digit] for digit in "0123456789"}
        self._prompts: dict[str, list[int]] = {}

    def _prompt_ids(self, prompt: str) -> list[int]:
        if prompt not in self._prompts:
            text = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
            )
            assert isinstance(text, str)
            self._prompts[prompt] = self._tokenizer.encode(text, add_special_tokens=False)
        return self._prompts[prompt]

    def batch(self, pairs: list[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
        """([B, T], [B, T]) int64, right-padded; labels are -100 outside answer and stop token."""
        rows = [
            (self._prompt_ids(prompt), [*(self._digit_ids[digit] for digit in answer), EOS_ID])
            for prompt, answer in pairs
        ]
        length = max(len(prompt) + len(answer) for prompt, answer in rows)
        input_ids = torch.full((len(rows), length), PAD_ID)
        labels = torch.full((len(rows), length), -100)
        for index, (prompt, answer) in enumerate(rows):
            end = len(prompt) + len(answer)
            input_ids[index, :end] = torch.tensor(prompt + answer)
            labels[index, len(prompt) : end] = torch.tensor(answer)
        return input_ids, labels


def off_by_one_digit(rng: random.Random, answer: int) -> int:
    """A plausible mistake in the ones or the tens, never negative."""
    return rng.choice([wrong for delta in (-10, -1, 1, 10) if (wrong := answer + delta) >= 0])


@torch.no_grad()
def measure(model: Qwen3ForCausalLM, encoder: Encoder, rows: tuple[PromptRow, ...]) -> Metrics:
    """Teacher-forced: exact for sampling at temperature 1, and equal to greedy decoding of the right answer."""
    input_ids, labels = encoder.batch([(row.prompt, row.answer) for row in rows])
    logits = model(input_ids=input_ids).logits[:, :-1].float()
    targets, mask = labels[:, 1:], labels[:, 1:] != -100
    logprobs = logits.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    correct = (logprobs * mask).sum(-1).exp().double()
    greedy = ((logits.argmax(-1) == targets) | ~mask).all(-1)
    mixed = 1 - correct**GROUP_SIZE - (1 - correct) ** GROUP_SIZE
    return Metrics(
        greedy_accuracy=greedy.double().mean().item(),
        sampled_accuracy=correct.mean().item(),
        mixed_groups=mixed.mean().item(),
    )


def noisy_pairs(recipe: Recipe, rows: tuple[PromptRow, ...], rng: random.Random) -> list[tuple[str, str]]:
    """One batch of (prompt, answer), the known share of answers wrong."""
    return [
        (row.prompt, str(off_by_one_digit(rng, int(row.answer))) if rng.random() < recipe.noise else row.answer)
        for row in rng.choices(rows, k=recipe.batch_size)
    ]


def train(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> tuple[Qwen3ForCausalLM, Metrics]:
    """AdamW with warm-up and cosine decay to a twentieth; prints held-out metrics on the way."""
    train_rows, heldout_rows = addition_rows(DataConfig())
    rng = random.Random(recipe.seed)
    torch.manual_seed(recipe.seed)
    model, encoder = build_model(len(tokenizer)), Encoder(tokenizer)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01, foreach=True
    )
    warmup, started = 50, time.perf_counter()
    model.train()
    for step in range(recipe.steps):
        decay = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * min(1.0, (step + 1) / warmup) * decay
        input_ids, labels = encoder.batch(noisy_pairs(recipe, train_rows, rng))
        loss = model(input_ids=input_ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 200 == 0:
            metrics = measure(model, encoder, heldout_rows)
            elapsed_s = time.perf_counter() - started
            print(f"step {step + 1:5d} {elapsed_s:6.1f} s loss {loss.item():.4f} {metrics}", flush=True)
    model.eval()
    return model, measure(model, encoder, heldout_rows)


def write_model_folder(
    out: Path, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe, metrics: Metrics
) -> None:
    """Replace `out` as a whole, so that a folder never mixes two models."""
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        folder = Path(scratch) / out.name
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        weights = folder / "model.safetensors"
        weights.chmod(0o644)
        provenance = {
            "script": "scripts/make_tiny_model.py",
            "command": "OMP_NUM_THREADS=1 python scripts/make_tiny_model.py",
            "recipe": asdict(recipe),
            "heldout_metrics": {name: round(value, 4) for name, value in asdict(metrics).items()},
            "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
            "model_safetensors_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__.partition("+")[0],
                "transformers": transformers.__version__,
                "tokenizers": tokenizers.__version__,
                "safetensors": safetensors.__version__,
                "machine": platform.machine(),
                "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            },
        }
        (folder / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n")
        if out.exists():
            shutil.rmtree(out)
        os.replace(folder, out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder to write or replace")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    recipe = Recipe(seed=1, steps=1600, batch_size=128, learning_rate=3e-3, noise=0.55)
    tokenizer = build_tokenizer()
    model, metrics = train(recipe, tokenizer)
    if problems := metrics.problems():
        print(f"nothing written, the model misses its targets: {'; '.join(problems)}", file=sys.stderr)
        return 1
    out.parent.mkdir(parents=True, exist_ok=True)
    write_model_folder(out, model, tokenizer, recipe, metrics)
    print(f"wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
