"""The independent reference of the trainer contract: Hugging Face's model, one document at a time, plain loops.

It shares nothing with a backend but PyTorch: no packing, no loss code, no schedule, no FSDP.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from grpo_lib.config import TrainerConfig
from grpo_lib.types import TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """What a correct backend must report, by sample id or Hugging Face name."""

    logprobs: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray]  # before clipping
    token_losses: list[float]
    entropies: list[float]
    grad_norms: list[float]  # by step, before clipping
    learning_rates: list[float]
    update_rms: list[float]
    weights: dict[int, dict[str, np.ndarray]]  # after that many steps


def judge(
    model_path: Path,
    samples: Sequence[TrainingSample],
    config: TrainerConfig,
    *,
    temperature: float,
    cap: float,
    total_steps: int,
    num_steps: int,
) -> Verdicts:
    """Run the reference; the loss is DAPO's on-policy surrogate with truncated importance weights."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="eager").eval()
    embeddings: Any = model.get_input_embeddings()
    embeddings.padding_idx = None  # PyTorch would drop the gradient of that token
    optimizer = torch.optim.AdamW(
        model.parameters(),
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        foreach=False,
    )
    denominator = sum(int(sample.response_mask.sum()) for sample in samples)
    logprobs, gradients, token_losses, entropies = {}, {}, [], []
    norms, rates, rms, weights = [], [], [], {}
    for step in range(num_steps):
        for sample in samples:
            values, nats = _solo(model, sample, temperature)
            losses = _token_losses(values, sample, cap)
            (torch.stack(losses).sum() / denominator).backward()
            if step == 0:
                logprobs[sample.sample_id] = values.detach().numpy()[sample.response_mask[1:]]
                token_losses += [float(loss.detach()) for loss in losses]
                entropies += nats.detach()[torch.from_numpy(sample.response_mask[1:])].tolist()
        if step == 0:
            gradients = {name: _grad(p).clone().numpy() for name, p in model.named_parameters()}
        norms.append(math.sqrt(sum(float(_grad(p).double().square().sum()) for p in model.parameters())))
        scale = min(1.0, config.max_grad_norm / (norms[-1] + 1e-6))
        rates.append(_learning_rate(config, step, total_steps))
        before = [p.detach().clone() for p in model.parameters()]
        for p in model.parameters():
            _grad(p).mul_(scale)
        optimizer.param_groups[0]["lr"] = rates[-1]
        optimizer.step()
        optimizer.zero_grad()
        change = torch.cat([(p.detach() - old).flatten() for p, old in zip(model.parameters(), before, strict=True)])
        rms.append(float(change.double().square().mean().sqrt()))
        weights[step + 1] = {name: p.detach().clone().numpy() for name, p in model.named_parameters()}
    return Verdicts(
        logprobs=logprobs,
        gradients=gradients,
        token_losses=token_losses,
        entropies=entropies,
        grad_norms=norms,
        learning_rates=rates,
        update_rms=rms,
        weights=weights,
    )


def _grad(parameter: torch.nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _solo(model: torch.nn.Module, sample: TrainingSample, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each token but the first, and the entropy there, of the document alone: [L - 1] each."""
    ids = torch.from_numpy(sample.input_ids)
    log_softmax = torch.log_softmax(model(ids[None]).logits[0, :-1] / temperature, dim=-1)
    return log_softmax[torch.arange(len(ids) - 1), ids[1:]], -(log_softmax.exp() * log_softmax).sum(-1)


def _token_losses(logprobs: torch.Tensor, sample: TrainingSample, cap: float) -> list[torch.Tensor]:
    """Token by token; on policy the ratio is 1, so the clipped branch is never the active one."""
    losses = []
    for position in np.flatnonzero(sample.response_mask):
        new = logprobs[position - 1]
        weight = min(
            math.exp(max(-10.0, min(10.0, float(new.detach()) - float(sample.rollout_logprobs[position])))), cap
        )
        ratio = torch.exp(new - new.detach())
        losses.append(-float(sample.advantages[position]) * ratio * weight)
    return losses


def _learning_rate(config: TrainerConfig, step: int, total_steps: int) -> float:
    """Linear warm-up that starts above 0, then the schedule; never 0 inside the run."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / (total_steps - config.warmup_steps)
    factor = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return config.learning_rate * factor[config.lr_scheduler]
