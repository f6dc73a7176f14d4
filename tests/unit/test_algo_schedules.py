"""The learning rate against figures worked by hand and against OLMo-core's own schedulers."""

from __future__ import annotations

import pytest
import torch

from grpo_lib.algo.schedules import Schedule, learning_rate
from grpo_lib.config import TrainerConfig
from grpo_lib.trainers.olmo_core_optim import SteppedAdamW


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1, 1, 0.853553, 0.5, 0.146447]),
    ],
)
def test_rates_worked_by_hand(schedule: Schedule, expected: list[float]) -> None:
    rates = [learning_rate(schedule, 1.0, step=step, warmup_steps=2, total_steps=6) for step in range(6)]
    assert rates == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup_steps", [0, 1, 5])
def test_both_trainers_learn_at_the_same_rate(schedule: Schedule, warmup_steps: int) -> None:
    config = TrainerConfig(learning_rate=3e-4, lr_scheduler=schedule, warmup_steps=warmup_steps)
    olmo_core = SteppedAdamW(torch.nn.Linear(2, 2), config, total_steps=20)  # pyright: ignore[reportArgumentType]
    for step in range(20):
        rate = learning_rate(schedule, 3e-4, step=step, warmup_steps=warmup_steps, total_steps=20)
        assert rate == pytest.approx(olmo_core.learning_rate(step), rel=1e-12)
        assert rate > 0
