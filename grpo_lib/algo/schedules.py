"""The learning rate as a function of the steps already applied; there is no schedule state to save or to lose."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(schedule: Schedule, peak: float, *, step: int, warmup_steps: int, total_steps: int) -> float:
    """Learning rate of the step that `step` applied steps precede; never 0 before `total_steps`.

    Peak 1, two steps of warm-up and a linear decay over 6 steps give .5, 1, 1, .75, .5, .25: the warm-up counts from 1,
    so that the first step learns, and the decay reaches 0 one past the last step.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    done = (step - warmup_steps) / (total_steps - warmup_steps)
    factor = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return peak * factor[schedule]
