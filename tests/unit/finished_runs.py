"""Synthetic finished runs: learning curves with noise of seeds, steps and prompts, and autocorrelated times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo_lib.config import RunConfig, resolve
from grpo_lib.parity.finished_run import FinishedRun
from grpo_lib.timing import SPANS

STEPS = 60
PROMPTS = 80
ROLLOUTS = 256  # per step: 16 groups of 16
SPAN_SECONDS = {
    "wait_for_rollouts": 0.6, "verify": 0.02, "pack": 0.01, "forward_backward": 0.3, "optim": 0.05, "weight_sync": 0.04,
    "canary": 0.0, "checkpoint": 0.01, "record": 0.005,
}  # fmt: skip
LINEAGE = {
    "model_sha256": "ab" * 32,
    "machine": {"cpus": 2, "system": "Linux"},
    "packages": {"torch": "2", "vllm": "1"},
}


def config(*overrides: str, seed: int = 1, trainer: str = "olmo_core") -> RunConfig:
    small = ["parity.min_tokens=1000", "evaluation.bootstrap_resamples=200", f"loop.steps={STEPS}"]
    return resolve("embedded_addition", [*small, *overrides], seed=seed, trainer=trainer)


def make_run(
    seed: int,
    *,
    reached: float = 0.9,
    seed_noise: float = 0.01,
    tis_rate: float = 0.0,
    truncated: float = 0.02,
    seconds: dict[str, float] | None = None,
    overrides: Sequence[str] = (),
    trainer: str = "olmo_core",
    **changes: Any,
) -> FinishedRun:
    """A run that learns from 0.5 to about `reached`; all its noise comes from `seed` and the trainer's name."""
    rng = np.random.default_rng([seed, len(trainer)])
    steps = int(dict(text.split("=") for text in overrides).get("loop.steps", STEPS))
    top = reached + rng.normal(0, seed_noise)
    speed = 15 * (1 + rng.normal(0, 0.05))
    rate = top - (top - 0.5) * np.exp(-np.arange(steps) / speed)
    slow = 1 + 0.03 * _autoregressive(rng, steps)
    rows = [
        _row(rng, step + 1, float(rate[step]), float(slow[step]), tis_rate, truncated, seconds or SPAN_SECONDS)
        for step in range(steps)
    ]
    difficulty = np.random.default_rng(7).normal(0, 0.1, PROMPTS)  # of the prompts, the same for every run
    by_prompt = rng.binomial(48, np.clip(top + difficulty - difficulty.mean(), 0.01, 0.99)) / 48
    values = {
        "name": f"{trainer}-{seed}",
        "folder": f"runs/{trainer}-{seed}-{reached}-{tis_rate}",
        "config": config(*overrides, seed=seed, trainer=trainer),
        "lineage": LINEAGE,
        "rows": rows,
        "accuracy": float(by_prompt.mean()),
        "correct_by_prompt": {f"heldout-{i}": float(share) for i, share in enumerate(by_prompt)},
        "dataset_sha256": "cd" * 32,
        "first_samples": f"samples of seed {seed}",
        "own_verdict": "PASS",
    }
    return FinishedRun(**(values | changes))


def side(seeds: Sequence[int], **options: Any) -> list[FinishedRun]:
    return [make_run(seed, **options) for seed in seeds]


def _autoregressive(rng: np.random.Generator, steps: int, coefficient: float = 0.5) -> np.ndarray:
    values = rng.normal(size=steps)
    for i in range(1, steps):
        values[i] += coefficient * values[i - 1]
    return values


def _row(
    rng: np.random.Generator,
    step: int,
    rate: float,
    slow: float,
    tis_rate: float,
    truncated: float,
    seconds: dict[str, float],
) -> dict[str, Any]:
    correct = rng.binomial(ROLLOUTS, np.clip(rate, 0, 1)) / ROLLOUTS
    tokens = int(rng.integers(700, 900))
    clipped = int(rng.poisson(tis_rate * tokens))
    cut = rng.binomial(ROLLOUTS, truncated) / ROLLOUTS
    times = {name: value * slow * float(rng.lognormal(0, 0.02)) for name, value in seconds.items()}
    assert times.keys() == set(SPANS), "a synthetic step has every span"
    times["other"] = 0.002
    times["step"] = sum(times.values())
    return {
        "step": step,
        "policy_version": step,
        "reward/mean": correct,
        "reward/correct_rate": correct,
        "reward/correct_rate_kept": 0.5,
        "response/len_mean": 3 + float(rng.normal(0, 0.05)),
        "response/truncated": cut,
        "response/tokens": 3 * ROLLOUTS,
        "loss/policy": float(rng.normal(0, 0.01)),
        "optim/grad_norm": float(rng.lognormal(0, 0.2)),
        "policy/entropy": 1 - rate / 2,
        "policy/clipfrac": 0.0,
        "mismatch/k3": 1e-9,
        "mismatch/abs_mean": 1e-7,
        "mismatch/tis_clip_count": clipped,
        "mismatch/tis_clipfrac": clipped / tokens,
        "mismatch/tis_ratio": 1.0,
        "advantage/max": 3.0,
        "verdict/failed_share": 0.0,
        "group/kept": 12,
        "group/zero_spread_low": 1,
        "group/zero_spread_high": 3,
        "group/excluded": 0,
        "batch/trained_tokens": tokens,
        "batch/real_tokens": 3 * tokens,
        **{f"time/{name}_s": value for name, value in times.items()},
        "time/group_latency_max_s": 0.3,
    }
