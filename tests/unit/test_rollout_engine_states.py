"""An engine's states, around a stand-in for vLLM that keeps a journal of what is asked of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_lib.config import RolloutConfig
from grpo_lib.data.models import resolve_model_path
from grpo_lib.errors import WeightSyncError
from grpo_lib.rollout.command_loop import LoopFailed
from grpo_lib.rollout.vllm_core import VllmCore
from grpo_lib.rollout.vllm_engine import IllegalTransition, VllmEngine
from grpo_lib.types import GenerationRequest, SamplingParams, WeightReceipt

RECEIPT = WeightReceipt(checksums={"a": 1}, num_bytes=4, unloaded=())
REQUEST = GenerationRequest(
    request_id="r",
    prompt_token_ids=(5,),
    sampling=SamplingParams(temperature=1.0, max_tokens=2, stop_token_ids=(1,)),
    seed=0,
)


class FakeLlm:
    """vLLM's synchronous engine, as far as states go: it remembers, and one call can be made to fail."""

    def __init__(self) -> None:
        self.journal: list[str] = []
        self.fails: str | None = None
        self.keeps_prefix_cache = False
        self.input_processor = SimpleNamespace(
            process_inputs=lambda key, *_, **__: SimpleNamespace(request_id=key), assign_request_id=lambda request: None
        )
        self.engine_core = SimpleNamespace(
            engine_core=SimpleNamespace(batch_queue=None),
            add_request=lambda _: self._note("add_request"),
            get_output=lambda: SimpleNamespace(outputs=[]),
            shutdown=lambda: self._note("shutdown"),
        )

    def _note(self, call: str) -> None:
        self.journal.append(call)
        if self.fails is not None and call.startswith(self.fails):
            raise RuntimeError("out of memory")

    def sleep(self, *, level: int, mode: str) -> None:
        self._note(f"sleep {level} {mode}")

    def wake_up(self) -> None:
        self._note("wake_up")

    def collective_rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> list[Any]:
        self._note(method)
        return [RECEIPT if method == "close_weight_tap" else None]

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> bool:
        self._note(f"reset_prefix_cache running={reset_running_requests}")
        return not self.keeps_prefix_cache

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)


class StandIn(VllmEngine):
    def _build(self, arguments: Callable[[], dict[str, Any]], threads: int, expects_fp32_head: bool) -> VllmCore:
        del arguments, threads, expects_fp32_head
        llm: Any = FakeLlm()
        return VllmCore(llm)

    @property
    def llm(self) -> FakeLlm:
        llm: Any = self._llm
        return llm


def stand_in(**rollout: Any) -> StandIn:
    return StandIn(
        model_path=resolve_model_path("builtin:tiny_qwen3"),
        config=RolloutConfig(**rollout),
        dtype="float32",
        transfer_backend="ipc",
        max_model_len=32,
        name="engine 3",
    )


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setattr(os, "environ", dict(os.environ))  # an engine owns its process' settings; here it shares one
    engine = stand_in(sleep_while_training=True)
    yield engine
    engine.close()


def update(engine: VllmEngine, version: int) -> None:
    engine.start_weight_update()
    engine.update_weights({"update_info": {}})
    engine.finish_weight_update()
    engine.commit_weights(version)


def test_a_night_and_a_morning(engine: StandIn) -> None:
    engine.pause()
    engine.sleep()
    engine.wake()
    update(engine, 7)
    engine.resume()
    engine.submit([REQUEST])
    assert engine.policy_version == 7
    calls = [call for call in engine.llm.journal if call != "add_request"]
    assert calls == [
        "sleep 1 keep", "wake_up", "open_weight_tap", "start_weight_update", "update_weights", "finish_weight_update",
        "close_weight_tap", "reset_prefix_cache running=True",
    ]  # fmt: skip


STATES: dict[str, tuple[str, ...]] = {  # state → the calls that lead there
    "running": (),
    "paused": ("pause",),
    "asleep": ("pause", "sleep"),
    "awake": ("pause", "sleep", "wake"),
    "updating": ("pause", "sleep", "wake", "start_weight_update"),
}
LEGAL = {  # call → states in which it is legal
    "sleep": {"paused"},
    "wake": {"asleep"},
    "resume": {"paused"},
    "pause": {"running", "paused"},
    "start_weight_update": {"paused", "awake"},
    "submit": {"running"},
    "score": {"running"},
    "finish_weight_update": {"updating"},
}
ARGUMENTS: dict[str, tuple[Any, ...]] = {"submit": ([REQUEST],), "score": ([((5, 6), 1)],)}


@pytest.mark.parametrize(
    ("state", "call"), [(state, call) for call in LEGAL for state in STATES if state not in LEGAL[call]]
)
def test_an_illegal_transition_names_both_states_and_asks_nothing_of_vllm(
    engine: StandIn, state: str, call: str
) -> None:
    for step in STATES[state]:
        getattr(engine, step)()
    before = list(engine.llm.journal)
    with pytest.raises(IllegalTransition) as caught:
        getattr(engine, call)(*ARGUMENTS.get(call, ()))
    message = str(caught.value)
    assert message.startswith(f"engine 3 is {state}; {call} is legal only while ")
    assert set(message.rpartition(" while ")[2].split(" or ")) == LEGAL[call]
    assert engine.llm.journal == before


def test_waking_alone_never_serves(engine: StandIn) -> None:
    """trl 5312: a sleeping engine dropped its weights and went on sampling from what was left."""
    for step in STATES["awake"]:
        getattr(engine, step)()
    for call, arguments in (("resume", ()), ("submit", ([REQUEST],)), ("pause", ())):
        with pytest.raises(IllegalTransition, match="engine 3 is awake"):
            getattr(engine, call)(*arguments)
    engine.start_weight_update()
    with pytest.raises(IllegalTransition, match="engine 3 is updating"):
        engine.resume()


def test_sleep_has_to_be_prepared_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    engine = stand_in()
    engine.pause()
    with pytest.raises(IllegalTransition, match=r"started with rollout\.sleep_while_training=false"):
        engine.sleep()
    assert engine.llm.journal == []
    engine.close()


@pytest.mark.parametrize(("steps", "fails"), [(("pause", "sleep"), "sleep"), (("pause", "sleep", "wake"), "wake_up")])
def test_half_a_sleep_is_the_engines_end(engine: StandIn, steps: tuple[str, ...], fails: str) -> None:
    engine.llm.fails = fails
    for step in steps[:-1]:
        getattr(engine, step)()
    with pytest.raises(RuntimeError, match="out of memory"):
        getattr(engine, steps[-1])()
    with pytest.raises(LoopFailed, match="engine 3 failed: RuntimeError: out of memory"):
        engine.wake()


def test_a_prefix_cache_that_stays_is_an_error(engine: StandIn) -> None:
    """NeMo-RL 4018: keys and values of the old weights answered for the new ones."""
    engine.llm.keeps_prefix_cache = True
    engine.pause()
    engine.start_weight_update()
    with pytest.raises(WeightSyncError, match="did not drop its prefix cache"):
        engine.finish_weight_update()
    with pytest.raises(LoopFailed):
        engine.resume()
