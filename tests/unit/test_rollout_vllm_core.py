"""A step under way when the engine pauses: its tokens are taken, and no further step starts. Logits that lost bits."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from grpo_lib.rollout.vllm_core import Generated, VllmCore
from grpo_lib.rollout.vllm_worker import WeightTap


class AsyncCore:
    """vLLM's asynchronous core in a few lines: a step is scheduled before the results of the one before are taken."""

    def __init__(self, lengths: dict[str, int]) -> None:
        self.lengths, self.started = lengths, 0
        self.batch_queue: deque[list[str]] | None = deque()
        self.paused = False

    def pause_scheduler(self, *, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", False)
        self.paused = True

    def resume_scheduler(self) -> None:
        assert not self.batch_queue
        self.paused = False

    def get_output(self) -> Any:
        queue = self.batch_queue
        assert queue is not None
        if not self.paused:
            self.started += 1
            queue.append(list(self.lengths))
            if len(queue) < 2:
                return SimpleNamespace(outputs=[])
        outputs = []
        for key in queue.popleft():
            if key not in self.lengths:  # finished before this step ended
                continue
            self.lengths[key] -= 1
            done = self.lengths[key] == 0
            logprobs = SimpleNamespace(logprobs=np.array([[-0.5]], np.float32))
            outputs.append(
                SimpleNamespace(
                    request_id=key, new_token_ids=[7], new_logprobs=logprobs, new_prompt_logprobs_tensors=None,
                    finish_reason="length" if done else None,
                )
            )  # fmt: skip
            if done:
                del self.lengths[key]
        return SimpleNamespace(outputs=outputs)

    def abort_requests(self, ids: list[str]) -> None:
        for key in ids:
            del self.lengths[key]


def started(**lengths: int) -> tuple[VllmCore, AsyncCore]:
    core = AsyncCore(dict(lengths))
    client = SimpleNamespace(engine_core=core, get_output=core.get_output, abort_requests=core.abort_requests)
    llm: Any = SimpleNamespace(engine_core=client)
    front = VllmCore(llm)
    front._unfinished = {key: Generated(key=key) for key in lengths}
    return front, core


def test_a_drain_takes_what_is_under_way_and_starts_nothing() -> None:
    front, core = started(a=5, b=2)
    assert front.step() == []  # the first is only started
    assert front.step() == []
    assert core.started == 2
    (finished,) = front.drain()
    assert (finished.key, finished.token_ids, finished.finish_reason) == ("b", [7, 7], "length")
    assert core.started == 2
    assert not core.batch_queue
    (left,) = front.unfinished
    assert (left.key, left.token_ids, left.logprobs) == ("a", [7, 7], [-0.5, -0.5])
    assert front.drain() == []


def test_a_synchronous_core_has_nothing_to_drain() -> None:
    front, core = started(a=5)
    core.batch_queue = None
    assert front.drain() == []
    assert not core.paused


def test_the_token_under_way_of_an_aborted_request_is_dropped() -> None:
    front, core = started(a=5, b=2)
    front.step()
    front.abort({"a"})
    assert [generated.key for generated in front.unfinished] == ["b"]
    assert [generated.key for generated in front.step()] == []
    assert [generated.token_ids for generated in front.drain()] == [[7, 7]]
    assert core.lengths == {}


@pytest.mark.parametrize(("kept", "expected"), [(torch.float32, True), (torch.bfloat16, False)])
def test_a_head_that_rounds_is_noticed(kept: torch.dtype, expected: bool) -> None:
    """A head that hands over fp32 of rounded logits is as wrong as one that hands over bfloat16."""
    model = torch.nn.Linear(16, 50, bias=False, dtype=torch.bfloat16)

    def compute_logits(hidden: torch.Tensor) -> torch.Tensor:
        return (hidden.float() @ model.weight.float().t()).to(kept).float()

    setattr(model, "compute_logits", compute_logits)  # noqa: B010 - an instance attribute
    tap = WeightTap()
    tap.model_runner = SimpleNamespace(
        get_model=lambda: model, model_config=SimpleNamespace(get_hidden_size=lambda: 16)
    )
    assert tap.has_fp32_head() is expected
