"""What a decode step of an engine consists of: the GPU's time by kind of kernel, and the host's by part of the step."""

from __future__ import annotations

import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# By name; the first that matches. FlashAttention is built with CUTLASS, and cuBLAS calls its Hopper kernels nvjet.
KINDS = (
    ("attention", r"flash|fmha|attn|attention|reshape_and_cache|slot_mapping|block_tables"),
    ("products", r"gemm|nvjet|cutlass|cublas|splitk|gemv|\bmm\b|addmm|linear"),
    ("sampler", r"gumbel|temperature|topk|top_k|top_p|softmax|_ranks|sampl|argmax|logprob|penalt|bad_words|min_p"),
    ("copies", r"memcpy|memset"),
    ("norms and pointwise", r"norm|rotary|rope|silu|act_and_mul|elementwise|reduce|index|gather|scatter|cat|fill|copy"),
)
OTHER = "other"
_SHOWN_KERNELS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One kernel or copy, in microseconds."""

    name: str
    start: float
    end: float


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), OTHER)


def busy_us(events: Sequence[Event]) -> float:
    """Time in which at least one runs."""
    busy, end = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.start):
        busy += max(0.0, event.end - max(event.start, end))
        end = max(end, event.end)
    return busy


def summary(events: Sequence[Event], steps: int) -> dict[str, Any]:
    """Milliseconds per step: all, by kind, and of the longest kernels."""
    by_kind: dict[str, float] = defaultdict(float)
    by_name: dict[str, list[float]] = defaultdict(list)
    for event in events:
        by_kind[kind_of(event.name)] += event.end - event.start
        by_name[event.name].append(event.end - event.start)
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:_SHOWN_KERNELS]
    return {
        "busy_ms": busy_us(events) / steps / 1e3,
        "kernels_per_step": len(events) / steps,
        "kind_ms": {kind: us / steps / 1e3 for kind, us in sorted(by_kind.items(), key=lambda item: -item[1])},
        "longest": [
            {"name": name[:120], "kind": kind_of(name), "ms": sum(us) / steps / 1e3, "per_step": len(us) / steps}
            for name, us in longest
        ],
    }


class StepProbe:
    """Stands before an engine's `step`: times some steps in the middle of a batch, then records as many on the device.

    The steps that are recorded are not the ones that are timed: recording slows them down. With asynchronous scheduling
    a call of `step` starts one step and takes the results of the one before; the device is empty when recording begins
    and when it ends, so that it has whole steps.

    Args:
        core: The engine's `VllmCore`.
        first: Step to begin with; until it every sequence must have been admitted.
        steps: How many to time, and how many to record.
    """

    def __init__(self, core: Any, *, first: int, steps: int) -> None:
        self._core, self._first, self._steps = core, first, steps
        self._plain = core.step
        self._count = 0
        self._host: dict[str, float] = defaultdict(float)
        self._step_s: list[float] = []
        self._session: Any = None
        self._restore: list[Callable[[], None]] = []
        self.failure: Exception | None = None  # while recording; the batch goes on without
        self.events: list[Event] = []

    def __enter__(self) -> StepProbe:
        self._set(self._core, "step", self._step)
        core = self._core.llm.engine_core.engine_core
        for owner, method in (
            (core.scheduler, "schedule"),
            (core.scheduler, "update_from_output"),
            (core.model_executor, "execute_model"),
            (core.model_executor, "sample_tokens"),
        ):
            self._set(owner, method, self._timed(method, getattr(owner, method)))
        return self

    def __exit__(self, *_: object) -> None:
        for restore in reversed(self._restore):
            restore()
        if self._session is not None:  # a profiler that runs when the process ends brings it down
            self._session.stop()
            self._session = None

    def result(self) -> dict[str, Any]:
        """Milliseconds per step. *wait* is the host waiting for the device, *outputs and rest* what is left of a step.

        Raises:
            RuntimeError: the batch was too short, or recording failed.
        """
        if self.failure is not None:
            raise RuntimeError(f"recording failed: {self.failure!r}") from self.failure
        if len(self._step_s) < self._steps or not self.events:
            raise RuntimeError(f"{self._count} steps are too few to record {self._steps} from step {self._first} on")
        wall = sum(self._step_s) / self._steps
        host = {part: 1e3 * seconds / self._steps for part, seconds in self._host.items()}
        host["outputs and rest"] = 1e3 * wall - sum(host.values())
        return {
            "steps": self._steps,
            "wall_ms": 1e3 * wall,
            "median_ms": 1e3 * statistics.median(self._step_s),
            "host_ms": host,
            **summary(self.events, self._steps),
        }

    def _set(self, owner: Any, name: str, value: Callable[..., Any]) -> None:
        """Shadow a method; leaving the probe uncovers it."""
        setattr(owner, name, value)
        self._restore.append(lambda: delattr(owner, name))

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = call(*args, **kwargs)
            self._spent(part, started)
            return _Awaited(result, self._spent) if hasattr(result, "result") else result

        return timed

    def _spent(self, part: str, started: float) -> None:
        if self._first <= self._count < self._first + self._steps:
            self._host[part] += time.perf_counter() - started

    def _step(self) -> Any:
        begin, end = self._first + self._steps, self._first + 2 * self._steps
        if self._count in (begin, end) and self.failure is None:
            try:
                self._record() if self._count == begin else self._take()
            except Exception as error:  # noqa: BLE001 the measurement around it counts more than this part of it
                self.failure = error
        started = time.perf_counter()
        done = self._plain()
        if self._first <= self._count < begin:
            self._step_s.append(time.perf_counter() - started)
        self._count += 1
        return done

    def _record(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        on_gpu = torch.cuda.is_available()
        self._session = profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU])
        if on_gpu:
            torch.cuda.synchronize()
        self._session.start()

    def _take(self) -> None:
        import torch

        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.synchronize()
        session, self._session = self._session, None
        session.stop()
        self.events = [
            Event(name=event.name, start=event.time_range.start, end=event.time_range.end)
            for event in session.events()
            # Without a GPU, operators that no other one called stand for kernels.
            if (event.device_type.name == "CUDA" if on_gpu else event.cpu_parent is None)
            and not getattr(event, "is_user_annotation", False)
        ]


class _Awaited:
    """A future whose wait is counted."""

    def __init__(self, inner: Any, spent: Callable[[str, float], None]) -> None:
        self._inner, self._spent = inner, spent

    def result(self, timeout: float | None = None) -> Any:
        started = time.perf_counter()
        value = self._inner.result() if timeout is None else self._inner.result(timeout)
        self._spent("wait", started)
        return value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def products_ms(matrices: Sequence[Any], rows: int, *, rounds: int = 7) -> float:
    """Milliseconds to multiply `rows` activations by all matrices of a model, one after the other; median of rounds.

    On a GPU they replay as one graph, as they do in a decode step.
    """
    import torch

    device = matrices[0].device
    inputs = {
        width: torch.randn(rows, width, device=device, dtype=matrices[0].dtype)
        for width in {matrix.shape[1] for matrix in matrices}
    }

    def work() -> None:
        for matrix in matrices:
            torch.nn.functional.linear(inputs[matrix.shape[1]], matrix)

    with torch.inference_mode():
        if device.type != "cuda":
            return 1e3 * statistics.median(_seconds(work) for _ in range(rounds))
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()

        def replay() -> None:
            graph.replay()
            torch.cuda.synchronize()

        replay()
        return 1e3 * statistics.median(_seconds(replay) for _ in range(rounds))


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def matrices_of(engine: Any) -> list[Any]:
    """Weights that a decode step multiplies by, as vLLM has fused them: all of the layers, and the vocabulary's."""
    import torch

    model = engine._vllm.llm.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.get_model()
    named = {name: value.detach() for name, value in model.named_parameters() if value.dim() == 2}
    head = named.get("lm_head.weight", named.get("model.embed_tokens.weight"))
    layers = [value for name, value in named.items() if ".layers." in name]
    if head is None or not layers:
        raise RuntimeError(f"{type(model).__name__} names its matrices otherwise: {sorted(named)[:4]}")
    assert all(isinstance(value, torch.Tensor) for value in layers)
    return [*layers, head]
