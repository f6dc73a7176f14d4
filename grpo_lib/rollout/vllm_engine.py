"""A vLLM engine in this process, stepped by one thread that nothing else may enter."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from grpo_lib.config import RolloutConfig
from grpo_lib.errors import ConfigError, DataError, WeightSyncError
from grpo_lib.rollout.command_loop import CommandLoop
from grpo_lib.rollout.model_folder import ModelFolder, open_model_folder
from grpo_lib.rollout.options import GpuBudget, engine_arguments, import_architecture, prepare_process
from grpo_lib.rollout.vllm_core import Generated, VllmCore
from grpo_lib.rollout.vllm_requests import (
    InFlight,
    InFlightScore,
    RequestLimits,
    finish_reason,
    sampling_params,
    scoring_params,
)
from grpo_lib.types import Completion, FinishReason, GenerationRequest, SamplingParams, WeightReceipt

_CLOSE_TIMEOUT_S = 30.0  # longest iteration or command that `close` waits out


class EngineState(StrEnum):
    """`UPDATING` from the start of a weight update until its policy version is committed.

    `AWAKE` has its memory back, but weights that nobody has certified since: only an update leads on from there.
    """

    RUNNING = "running"
    PAUSED = "paused"
    ASLEEP = "asleep"
    AWAKE = "awake"
    UPDATING = "updating"
    CLOSED = "closed"


class IllegalTransition(RuntimeError):
    """A call that the engine's state does not allow."""


class VllmEngine:
    """`RolloutEngine` on vLLM's synchronous engine; owns its process' torch settings.

    One thread steps vLLM; every other call is a command that it runs between two steps. On a GPU the next step is under
    way by then: a pause first takes its results, so weights never change inside one and no token has two versions.
    The states are RUNNING → PAUSED → UPDATING → PAUSED → RUNNING,
    and with sleep RUNNING → PAUSED → ASLEEP → AWAKE → UPDATING → PAUSED → RUNNING.

    A weight update drops the prefix cache and recomputes the keys and values of requests in flight when they go on:
    every token's log-probability is that of the version in its span, given the tokens before it. An update that fails
    half-way leaves undefined weights; the engine is then as dead as after a failed step.
    """

    def __init__(
        self,
        *,
        model_path: Path,
        config: RolloutConfig,
        dtype: str,
        transfer_backend: str,
        max_model_len: int,
        policy_version: int = 0,
        threads: int = 1,
        name: str = "engine",
        fp32_head: bool = False,
        gpu: GpuBudget | None = None,
    ) -> None:
        """Load the model and warm up; returns when the engine can serve.

        Args:
            transfer_backend: vLLM weight-transfer backend: ``"cpu_gloo"``, ``"nccl"`` or ``"ipc"``.
            max_model_len: Longest prompt and response together, in tokens.
            policy_version: Version of the folder's weights.
            threads: Math threads of this process.
            name: How errors call this engine.
            fp32_head: Project to the vocabulary in fp32 in a bfloat16 model, as `model.fp32_head` says.
            gpu: Memory it may take; required on a GPU, without effect on a CPU.

        Raises:
            DataError: the folder lacks weights or does not fit its config.
            ConfigError: an fp32 head was asked for, but vLLM does not compute one.
        """
        prepare_process(threads)
        self._name, self._config = name, config
        self._folder = open_model_folder(model_path)
        self._limits = _limits(self._folder, config, max_model_len)
        self._policy_version = policy_version
        self._state = EngineState.RUNNING
        self._in_flight: dict[str, InFlight] = {}
        self._scores: dict[str, InFlightScore] = {}
        self._score_ids = itertools.count()
        self._receipts: tuple[WeightReceipt, ...] = ()
        self._finished: list[Completion] = []
        self._arrived = threading.Condition()  # guards `_finished`, `_in_flight` and `_state`
        self._loop = CommandLoop(name, iterate=self._step, has_work=self._has_work, on_failure=self._give_up)
        self._loop.start()
        expects_fp32_head = fp32_head and dtype != "float32"
        arguments = partial(
            engine_arguments,
            model_path=model_path,
            config=config,
            dtype=dtype,
            transfer_backend=transfer_backend,
            # Scoring a sequence samples one token in addition.
            max_model_len=self._limits.max_scored_len + 1,
            fp32_head=fp32_head,
            gpu=gpu,
        )
        self._vllm = self._loop.call(lambda: self._build(arguments, threads, expects_fp32_head), fatal=True)

    # -- generating ------------------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        return self._policy_version

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            self._limits.check(request)
        with self._arrived:
            self._require("submit", EngineState.RUNNING)
            taken = self._in_flight.keys() | {completion.request_id for completion in self._finished}
            for request in requests:
                if request.request_id in taken:
                    raise ValueError(f"{self._name}: request id {request.request_id!r} is already in flight")
                taken.add(request.request_id)
            flights = [InFlight(request=request) for request in requests]
            self._in_flight.update((flight.request.request_id, flight) for flight in flights)
        self._loop.post(lambda: self._admit(flights), fatal=True)

    def poll(self, timeout_s: float) -> list[Completion]:
        with self._arrived:
            self._arrived.wait_for(
                lambda: self._finished or self._loop.has_failed or self._state is EngineState.CLOSED, timeout_s
            )
            self._loop.check()
            if self._state is EngineState.CLOSED:
                raise IllegalTransition(f"{self._name} is closed")
            finished, self._finished = self._finished, []
            return finished

    def abort(self, request_ids: Iterable[str]) -> list[Completion]:
        """Cancel requests and return what they had: fragments, or whole completions that no poll has taken yet.

        Afterwards no poll returns them. Unknown ids are ignored: their completions were polled before.
        """
        wanted = frozenset(request_ids)
        return self._loop.call(lambda: self._abort(wanted), fatal=True)

    def score(self, sequences: Sequence[tuple[Sequence[int], int]]) -> list[np.ndarray]:
        if self._config.temperature != 1.0:
            raise ValueError(
                f"{self._name} samples at rollout.temperature={self._config.temperature}, but vLLM scores given tokens "
                "at temperature 1 only; score with the trainer, or run at temperature 1"
            )
        self._require("score", EngineState.RUNNING)
        for index, (token_ids, num_prompt_tokens) in enumerate(sequences):
            self._limits.check_tokens(f"sequence {index}", token_ids)
            if not 1 <= num_prompt_tokens < len(token_ids) <= self._limits.max_scored_len:
                raise ValueError(
                    f"sequence {index}: {len(token_ids)} tokens, {num_prompt_tokens} of them prompt; needs at least "
                    f"one of prompt and response, and at most {self._limits.max_scored_len} in all"
                )
        futures = self._loop.call(lambda: self._admit_scores(sequences), fatal=True)
        return [future.result() for future in futures]

    # -- pausing and weights ---------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Stop stepping, once the step under way has ended; pausing a paused engine changes nothing."""
        self._move(
            "pause",
            {EngineState.RUNNING, EngineState.PAUSED},
            EngineState.PAUSED,
            lambda: self._settle(self._vllm.drain()),
        )

    def resume(self) -> None:
        self._transition("resume", {EngineState.PAUSED}, EngineState.RUNNING)

    def sleep(self) -> None:
        """Free the GPU memory: the cache is dropped, weights wait in host memory, requests in flight begin anew.

        Raises:
            IllegalTransition: the engine is not paused, or `rollout.sleep_while_training` is off.
        """
        if not self._config.sleep_while_training:
            raise IllegalTransition(f"{self._name} was started with rollout.sleep_while_training=false")
        self._move("sleep", {EngineState.PAUSED}, EngineState.ASLEEP, lambda: self._llm.sleep(level=1, mode="keep"))

    def wake(self) -> None:
        """Take the memory back. A sleeping engine can lose weights without a word (trl 5312), so that the engine
        serves again only after a weight update, whose certificate the caller checks before `resume`."""
        self._move("wake", {EngineState.ASLEEP}, EngineState.AWAKE, lambda: self._llm.wake_up())

    def load_weights(self, path: Path, policy_version: int) -> None:
        folder = open_model_folder(path)
        if folder.tensor_shapes != self._folder.tensor_shapes:
            raise DataError(
                f"{path} does not hold the tensors that {self._folder.path} has, so {self._name} cannot load it"
            )
        self._begin_update("load_weights")
        self._weight_call("reload_weights", weights_path=str(path))
        self._end_update()
        for receipt in self._receipts:
            if lost := {*receipt.unloaded, *(self.checkpoint_names() - receipt.checksums.keys())}:
                raise WeightSyncError(f"{self._name}: loading {path} left out {sorted(lost)}")
        self.commit_weights(policy_version)

    def checkpoint_names(self) -> frozenset[str]:
        """Hugging Face names that a complete update must bring; a head tied to the embeddings is not one of them."""
        return frozenset(self._folder.tensor_shapes)

    def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        """Join the transfer channel: ``{"init_info": {…}}`` as the backend wants it. Blocks until all have joined."""
        self._require("init_weight_transfer_engine", EngineState.RUNNING, EngineState.PAUSED)
        self._loop.call(
            lambda: self._llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": request["init_info"]})
        )

    def start_weight_update(self) -> None:
        self._begin_update("start_weight_update")
        self._weight_call("start_weight_update")

    def update_weights(self, request: dict[str, Any]) -> None:
        """Receive one ``{"update_info": {…}}``; every backend has this one form."""
        self._require_open_update("update_weights")
        self._weight_call("update_weights", update_info=request["update_info"])

    def finish_weight_update(self) -> None:
        self._require_open_update("finish_weight_update")
        self._weight_call("finish_weight_update")
        self._end_update()

    def commit_weights(self, policy_version: int) -> tuple[WeightReceipt, ...]:
        """Give the finished update its version and return what each worker received."""
        return self._loop.call(lambda: self._commit(policy_version))

    def shutdown_weight_transfer_engine(self) -> None:
        """Leave the transfer channel; weights stay as they are."""
        self._require("shutdown_weight_transfer_engine", EngineState.RUNNING, EngineState.PAUSED)
        self._loop.call(lambda: self._llm.collective_rpc("shutdown_weight_transfer_engine"))

    def close(self) -> None:
        """Shut vLLM down; requests in flight are lost. A second call does nothing."""
        with self._arrived:
            if self._state is EngineState.CLOSED:
                return
            self._state = EngineState.CLOSED
            self._arrived.notify_all()
        if not self._loop.has_failed:
            self._loop.post(self._shut_down)
        self._loop.stop(_CLOSE_TIMEOUT_S)
        self._give_up(IllegalTransition(f"{self._name} was closed"))

    # -- in the loop's thread --------------------------------------------------------------------------------------

    def _build(self, arguments: Callable[[], dict[str, Any]], threads: int, expects_fp32_head: bool) -> VllmCore:
        import torch
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        import_architecture(self._folder.path, self._config)
        torch.set_num_threads(threads)  # counted per thread, and vLLM forbids it once it runs
        core = VllmCore(LLMEngine.from_engine_args(EngineArgs(**arguments())))
        if expects_fp32_head and not all(core.llm.collective_rpc("has_fp32_head")):
            raise ConfigError(
                f"{self._name}: asked for an fp32 head, as the trainer has it, but this vLLM rounds the logits of "
                f"{self._folder.path} to bfloat16; set model.fp32_head=false, so that both sides round"
            )
        _warm_up(core, self._limits.max_model_len)
        return core

    def _has_work(self) -> bool:
        return self._state is EngineState.RUNNING and bool(self._in_flight or self._scores)

    def _admit(self, flights: Sequence[InFlight]) -> None:
        for flight in flights:
            request = flight.request
            self._vllm.add(
                request.request_id, request.prompt_token_ids, sampling_params(request.sampling, request.seed)
            )

    def _admit_scores(self, sequences: Sequence[tuple[Sequence[int], int]]) -> list[Future[np.ndarray]]:
        futures: list[Future[np.ndarray]] = []
        for token_ids, num_prompt_tokens in sequences:
            score = InFlightScore(num_tokens=len(token_ids), num_prompt_tokens=num_prompt_tokens, future=Future())
            key = f"\0score-{next(self._score_ids)}"  # no request id of a caller starts with NUL
            self._scores[key] = score
            futures.append(score.future)
            self._vllm.add(key, token_ids, scoring_params())
        return futures

    def _step(self) -> None:
        self._settle(self._vllm.step())

    def _settle(self, finished: Sequence[Generated]) -> None:
        """Hand out what finished under the current policy version."""
        done: list[Completion] = []
        for generated in finished:
            if (score := self._scores.pop(generated.key, None)) is not None:
                score.future.set_result(score.response_part(generated.prompt_logprobs))
                continue
            reason = finish_reason(generated.finish_reason)
            done.append(self._in_flight[generated.key].completion(generated, reason, self._policy_version))
        if done:
            self._deliver(done)

    def _deliver(self, done: Sequence[Completion]) -> None:
        with self._arrived:
            for completion in done:
                del self._in_flight[completion.request_id]
            self._finished.extend(done)
            self._arrived.notify_all()

    def _abort(self, wanted: frozenset[str]) -> list[Completion]:
        fragments = [
            flight.completion(generated, FinishReason.ABORT, self._policy_version)
            for flight, generated in self._progress()
            if generated.key in wanted
        ]
        self._vllm.abort([fragment.request_id for fragment in fragments])
        with self._arrived:
            for fragment in fragments:
                del self._in_flight[fragment.request_id]
            whole = [completion for completion in self._finished if completion.request_id in wanted]
            self._finished = [completion for completion in self._finished if completion.request_id not in wanted]
        return whole + fragments

    def _commit(self, policy_version: int) -> tuple[WeightReceipt, ...]:
        self._require("commit_weights", EngineState.UPDATING)
        if not self._receipts:
            raise IllegalTransition(f"{self._name}: commit_weights before the update has finished")
        for flight, generated in self._progress():
            flight.marks.append((self._policy_version, len(generated.token_ids)))
        self._policy_version = policy_version
        self._set_state(EngineState.PAUSED)
        receipts, self._receipts = self._receipts, ()
        return receipts

    def _progress(self) -> list[tuple[InFlight, Generated]]:
        """Unfinished samples with what they have so far."""
        flights = ((self._in_flight.get(generated.key), generated) for generated in self._vllm.unfinished)
        return [(flight, generated) for flight, generated in flights if flight is not None]  # else one being scored

    @property
    def _llm(self) -> Any:
        return self._vllm.llm

    def _shut_down(self) -> None:
        self._vllm.shutdown()

    # -- states ----------------------------------------------------------------------------------------------------

    def _begin_update(self, call: str) -> None:
        self._transition(call, {EngineState.PAUSED, EngineState.AWAKE}, EngineState.UPDATING)
        self._weight_call("open_weight_tap")

    def _weight_call(self, method: str, **kwargs: Any) -> list[Any]:
        return self._loop.call(lambda: self._llm.collective_rpc(method, kwargs=kwargs), fatal=True)

    def _end_update(self) -> None:
        def end() -> None:
            self._receipts = tuple(self._llm.collective_rpc("close_weight_tap"))
            # Requests in flight hold cache blocks: without `reset_running_requests` vLLM would keep the whole cache.
            if not self._llm.reset_prefix_cache(reset_running_requests=True):
                raise WeightSyncError(f"{self._name}: vLLM did not drop its prefix cache after a weight update")

        self._loop.call(end, fatal=True)

    def _transition(self, call: str, allowed: set[EngineState], target: EngineState) -> None:
        def move() -> None:
            self._require(call, *allowed)
            self._set_state(target)

        self._loop.call(move)

    def _move(self, call: str, allowed: set[EngineState], target: EngineState, work: Callable[[], object]) -> None:
        """A transition with work in it; when that fails, what the engine holds is unknown and it ends."""
        self._require(call, *allowed)

        def move() -> None:
            self._require(call, *allowed)
            work()
            self._set_state(target)

        self._loop.call(move, fatal=True)

    def _set_state(self, state: EngineState) -> None:
        with self._arrived:
            if self._state is not EngineState.CLOSED:
                self._state = state

    def _require(self, call: str, *allowed: EngineState) -> None:
        self._loop.check()
        if self._state not in allowed:
            raise IllegalTransition(
                f"{self._name} is {self._state}; {call} is legal only while {' or '.join(sorted(allowed))}"
            )

    def _require_open_update(self, call: str) -> None:
        self._require(call, EngineState.UPDATING)
        if self._receipts:
            raise IllegalTransition(f"{self._name}: {call} after the update has finished; commit_weights comes next")

    def _give_up(self, failure: Exception) -> None:
        """Nothing will finish any more: wake everybody who waits."""
        with self._arrived:
            scores, self._scores = self._scores, {}
            for score in scores.values():
                score.future.set_exception(failure)
            self._arrived.notify_all()


def _limits(folder: ModelFolder, config: RolloutConfig, max_model_len: int) -> RequestLimits:
    if folder.max_positions is not None and max_model_len > folder.max_positions:
        raise ValueError(
            f"prompt and response need {max_model_len} positions, but {folder.path} has {folder.max_positions}; "
            "lower rollout.max_tokens or data.max_prompt_tokens"
        )
    # Where the architecture allows not one token more, the longest sequences cannot be scored.
    room_for_one_more = folder.max_positions is None or max_model_len < folder.max_positions
    return RequestLimits(
        max_model_len=max_model_len,
        max_scored_len=max_model_len if room_for_one_more else max_model_len - 1,
        vocab_size=folder.vocab_size,
        temperature=config.temperature,
    )


def _warm_up(core: VllmCore, max_model_len: int) -> None:
    """Run one sampled request and one scored one, so that the first real one finds everything loaded."""
    prompt = [0] * max(1, min(4, max_model_len - 2))
    num_tokens = min(2, max_model_len - len(prompt))  # the second is the first to be decoded
    sampling = SamplingParams(temperature=1.0, max_tokens=num_tokens, stop_token_ids=())
    core.add("sample", prompt, sampling_params(sampling, seed=0))
    core.add("score", prompt, scoring_params())
    while core.unfinished:
        core.step()
    core.drain()
    core.llm.reset_prefix_cache()
