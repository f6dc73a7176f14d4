"""In which order training visits the prompts: endless, reshuffled each epoch, resumable anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from grpo_lib.errors import DataError
from grpo_lib.seeds import epoch_order
from grpo_lib.types import Prompt


class PromptStream:
    """Visits every prompt once per epoch, in an order that only run seed and epoch decide.

    Three prompts, `take(4)`: epoch 0 in its order, then the first prompt of epoch 1 in *its* order. A restored stream
    continues inside the epoch it stopped in: resuming must not replay the first epoch's order, nor an epoch's start.
    """

    def __init__(self, prompts: Sequence[Prompt], run_seed: int) -> None:
        if not prompts:
            raise DataError("there is no training prompt to draw from")
        repeated = len(prompts) - len({prompt.prompt_id for prompt in prompts})
        if repeated:
            raise DataError(
                f"{repeated} training prompts share an id with another; groups and seeds are told apart by it"
            )
        self._prompts = tuple(prompts)
        self._run_seed = run_seed
        self._position = 0  # prompts taken since the run began
        self._epoch, self._order = -1, np.zeros(0, np.int64)  # the epoch whose order is at hand: none yet

    def __len__(self) -> int:
        """Prompts per epoch."""
        return len(self._prompts)

    def take(self, count: int) -> list[tuple[int, Prompt]]:
        """The next `count` (epoch, prompt) pairs; they may cross into the next epoch."""
        return [self._next() for _ in range(count)]

    def state(self) -> dict[str, int]:
        """Position and the number of prompts it belongs to, plain for a checkpoint."""
        return {"position": self._position, "num_prompts": len(self._prompts)}

    def restore(self, state: Mapping[str, int]) -> None:
        """Continue where `state` was taken.

        Raises:
            DataError: it was taken over another number of prompts, so the position means another prompt.
        """
        if state["num_prompts"] != len(self._prompts):
            raise DataError(
                f"the checkpoint's order is over {state['num_prompts']} training prompts, but there are "
                f"{len(self._prompts)} now; resume with the data it was trained on"
            )
        if state["position"] < 0:
            raise DataError(f"the checkpoint's prompt position is {state['position']}; it is damaged")
        self._position = state["position"]

    def _next(self) -> tuple[int, Prompt]:
        epoch, offset = divmod(self._position, len(self._prompts))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, epoch_order(self._run_seed, epoch, len(self._prompts))
        self._position += 1
        return epoch, self._prompts[int(self._order[offset])]
