"""vLLM's engine without its front end: token ids in, token ids with their log-probabilities out, one step at a time.

`LLMEngine.step` makes of each token of each request a record with rank, text and alternatives. Nobody here reads
those, and at some hundred sequences making them takes the host as long as scheduling the batch does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import vllm
    from vllm.v1.engine.llm_engine import LLMEngine


@dataclass(slots=True, kw_only=True)
class Generated:
    """What one request has so far."""

    key: str  # the caller's name for it
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # as many, where the request asked for them
    prompt_logprobs: np.ndarray | None = None  # [prompt tokens - 1] float32, where it asked for them
    finish_reason: str | None = None  # vLLM's word; None while it goes on

    def take(self, output: Any) -> None:
        """Add what one step brought, vLLM's `EngineCoreOutput`; the first column of its arrays is the token itself."""
        self.token_ids += output.new_token_ids
        if (sampled := output.new_logprobs) is not None:
            self.logprobs += sampled.logprobs[:, 0].tolist()
        if (prompt := output.new_prompt_logprobs_tensors) is not None:
            self.prompt_logprobs = prompt.logprobs[:, 0].numpy()
        if (reason := output.finish_reason) is not None:
            self.finish_reason = str(reason)


class VllmCore:
    """The engine of a `LLMEngine` in this process; one thread only.

    On a GPU vLLM schedules a step before it has seen the tokens of the one before, so that the GPU never waits for the
    host: after `step` one more may be under way. `drain` waits for it; nothing else may touch weights before.
    """

    def __init__(self, llm: LLMEngine) -> None:
        self.llm = llm
        self._unfinished: dict[str, Generated] = {}  # by vLLM's own id

    def add(self, key: str, token_ids: Sequence[int], params: vllm.SamplingParams) -> None:
        request = self.llm.input_processor.process_inputs(
            key,
            {"type": "token", "prompt_token_ids": list(token_ids)},
            params,
            supported_tasks=self.llm.get_supported_tasks(),
        )
        self.llm.input_processor.assign_request_id(request)  # makes ids unique, for requests of equal names
        self._unfinished[request.request_id] = Generated(key=key)
        self.llm.engine_core.add_request(request)

    @property
    def unfinished(self) -> Collection[Generated]:
        return self._unfinished.values()

    def step(self) -> list[Generated]:
        """Run one step, or wait for one under way; returns the requests that it finished."""
        finished: list[Generated] = []
        for output in self.llm.engine_core.get_output().outputs:
            generated = self._unfinished.get(output.request_id)
            if generated is None:  # aborted meanwhile
                continue
            generated.take(output)
            if generated.finish_reason is not None:
                del self._unfinished[output.request_id]
                finished.append(generated)
        return finished

    def drain(self) -> list[Generated]:
        """Take the results of steps under way and start none; returns the requests that they finished."""
        core: Any = self.llm.engine_core
        core = core.engine_core
        if core.batch_queue is None:  # a step ends before `step` does
            return []
        finished: list[Generated] = []
        core.pause_scheduler(mode="keep", clear_cache=False)
        while core.batch_queue:
            finished += self.step()
        core.resume_scheduler()
        return finished

    def abort(self, keys: Collection[str]) -> None:
        ids = [own for own, generated in self._unfinished.items() if generated.key in keys]
        for own in ids:
            del self._unfinished[own]
        self.llm.engine_core.abort_requests(ids)

    def shutdown(self) -> None:
        self.llm.engine_core.shutdown()
