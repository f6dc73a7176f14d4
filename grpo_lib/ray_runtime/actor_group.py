"""One generic group of Ray actors. Trainer ranks and engines are both objects that a factory makes in a process."""

from __future__ import annotations

import os
import pickle
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from grpo_lib.errors import DeadlineExceeded, RankFailure
from grpo_lib.ray_runtime.cluster import ResourceDemand, check_cluster

_ROOT_CAUSE_GRACE_S = 2.0  # how long to look for the member whose death made another one fail
_ALL_AT_ONCE_S = 0.05  # most calls are over by then, and one wait for all members costs half of one wait for each
_CLOSE_S = 10.0
_CAUSE_CHARS = 600


@dataclass(frozen=True, slots=True)
class Answer:
    """What a member's method returned, or how it raised. Sent instead of letting Ray wrap, print and log the error."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""

    def unwrap(self, member: str, method: str) -> Any:
        """The value, or `RankFailure` naming the member with the original error as its cause."""
        if self.error is None:
            return self.value
        self.error.add_note(f"raised by {member}:\n{self.trace}")
        raise RankFailure(f"{member}: {method}: {type(self.error).__name__}: {self.error}") from self.error


class Host:
    """The actor: makes its object in its own process and forwards calls to it."""

    def __init__(self) -> None:
        self._object: Any = None

    def build(self, factory: Callable[[], Any]) -> Answer:
        """Make the object; answers with the process's id."""

        def make() -> int:
            self._object = factory()
            return os.getpid()

        return _answer(make)

    def ping(self) -> Answer:
        return Answer()

    def invoke(self, name: str, *args: Any, **kwargs: Any) -> Answer:
        """Call a method, or read an attribute that is not callable."""

        def call() -> Any:
            if self._object is None:
                raise RuntimeError(f"{name} was called before the object was built")
            attribute = getattr(self._object, name)
            return attribute(*args, **kwargs) if callable(attribute) else attribute

        return _answer(call)

    def invoke_and_read(self, name: str, attribute: str) -> Answer:
        """Call a method, then read an attribute: ``(result, value)`` for one round trip."""
        return _answer(lambda: (getattr(self._object, name)(), getattr(self._object, attribute)))


def _answer(call: Callable[[], Any]) -> Answer:
    try:
        return Answer(value=call())
    except Exception as error:  # noqa: BLE001 - the process boundary: the driver raises it again
        return Answer(error=_picklable(error), trace=traceback.format_exc())


def _picklable(error: Exception) -> BaseException:
    """The error itself if it survives the trip to the driver, else one with its type and text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - a foreign exception's pickling may fail in any way
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class Pending:
    """Calls under way on some members."""

    def __init__(self, method: str, labels: Mapping[Any, str]) -> None:
        self._method = method
        self._labels = labels  # object reference → member, in member order

    def wait(self, *, deadline_s: float, setting: str) -> list[Any]:
        """Results in member order.

        Raises:
            RankFailure: a member raised or its process died. Where one failure brings others with it, deaths come
                first in the message, and the cause is the first member's error.
            DeadlineExceeded: names the members that have not answered.
        """
        deadline = limit = time.monotonic() + deadline_s
        answers: dict[Any, Answer] = {}
        done, waiting = ray.wait(
            list(self._labels), num_returns=len(self._labels), timeout=max(min(_ALL_AT_ONCE_S, deadline_s), 0.0)
        )
        while True:
            answers.update(zip(done, _fetch(done), strict=True))
            if limit == deadline and any(answer.error is not None for answer in answers.values()):
                limit = min(deadline, time.monotonic() + _ROOT_CAUSE_GRACE_S)
            if not waiting:
                break
            done, waiting = ray.wait(waiting, num_returns=1, timeout=max(limit - time.monotonic(), 0.0))
            if not done:
                break
        failures = {self._labels[ref]: answer for ref, answer in answers.items() if answer.error is not None}
        if failures:
            self._raise(failures)
        if waiting:
            raise DeadlineExceeded(
                stage=self._method,
                waited_for=f"{', '.join(self._labels[ref] for ref in waiting)} (of {len(self._labels)})",
                deadline_s=deadline_s,
                setting=setting,
            )
        return [answers[ref].value for ref in self._labels]

    def _raise(self, failures: Mapping[str, Answer]) -> None:
        ordered = sorted(failures, key=lambda member: not isinstance(failures[member].error, MemberDied))
        try:
            failures[ordered[0]].unwrap(ordered[0], self._method)
        except RankFailure as failure:
            others = [f"{member}: {failures[member].error}" for member in ordered[1:]]
            raise RankFailure("\n".join([str(failure), *others])) from failure.__cause__


class MemberDied(RuntimeError):
    """A member's process ended; the text is Ray's explanation."""


def _fetch(refs: Sequence[Any]) -> list[Answer]:
    """The answers of finished calls; the end of a process becomes an answer too."""
    try:
        return ray.get(list(refs))
    except RayError as error:
        if len(refs) > 1:
            return [answer for ref in refs for answer in _fetch([ref])]
        if isinstance(error, RayActorError):
            error = MemberDied(f"the process died: {' '.join(str(error).split())[:_CAUSE_CHARS]}")
        return [Answer(error=error)]


class ActorGroup:
    """N actors that host objects made by factories, with deadlines and named failures on every call.

    Args:
        name: How errors call a member: ``"trainer rank"`` gives ``"trainer rank 1"``.
        factories: One per member; pickled, and called in the member's process.
        num_cpus: Reserved for each member.
        num_gpus: Likewise.
        env_vars: Environment of the members' processes, set before Python starts there.
        max_concurrency: Calls that run at the same time in one member; with 1 they run in the order sent.
        placement_deadline_s: Deadline for the cluster to find room for all members.
    """

    def __init__(
        self,
        name: str,
        factories: Sequence[Callable[[], Any]],
        *,
        num_cpus: float,
        num_gpus: float = 0.0,
        env_vars: Mapping[str, str] | None = None,
        max_concurrency: int = 1,
        placement_deadline_s: float = 60.0,
    ) -> None:
        if not factories:
            raise ValueError(f"a group of {name}s needs at least one factory")
        if "CUDA_VISIBLE_DEVICES" in (env_vars or {}):
            raise ValueError(f"{name}: CUDA_VISIBLE_DEVICES is set by Ray for each actor; forwarding it hides devices")
        self.name, self.size = name, len(factories)
        self._factories = tuple(factories)
        self._num_cpus, self._num_gpus = num_cpus, num_gpus
        self._env_vars = dict(env_vars or {})
        self.max_concurrency = max_concurrency
        self._placement_deadline_s = placement_deadline_s
        self._placement: Any = None
        self._building: Pending | None = None
        self._built = False
        self._pids: tuple[int, ...] = ()
        self.handles: tuple[Any, ...] = ()

    def label(self, index: int) -> str:
        return f"{self.name} {index}"

    @property
    def processes(self) -> dict[str, int]:
        """Process id by member, each on its own machine; empty until all objects are built."""
        return {self.label(index): pid for index, pid in enumerate(self._pids)}

    def launch(self) -> None:
        """Ask for the processes and return at once, so that several groups start side by side.

        Raises:
            PreflightError: the cluster as a whole is too small, with the figures.
        """
        if self.handles:
            raise RuntimeError(f"the group of {self.name}s is already launched")
        check_cluster(ResourceDemand(name=self.name, count=self.size, cpus=self._num_cpus, gpus=self._num_gpus))
        bundle = {"CPU": self._num_cpus} | ({"GPU": self._num_gpus} if self._num_gpus else {})
        self._placement = placement_group([bundle] * self.size, strategy="PACK")
        actor_class = ray.remote(Host)
        self.handles = tuple(
            actor_class.options(
                num_cpus=self._num_cpus,
                num_gpus=self._num_gpus,
                max_concurrency=self.max_concurrency,
                runtime_env={"env_vars": self._env_vars},
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._placement, placement_group_bundle_index=index
                ),
            ).remote()
            for index in range(self.size)
        )
        refs = [handle.build.remote(factory) for handle, factory in zip(self.handles, self._factories, strict=True)]
        self._building = self._pending("start", dict(enumerate(refs)))

    def wait_ready(self, *, deadline_s: float, setting: str) -> None:
        """Wait until every member's object is built."""
        if self._building is None:
            raise RuntimeError(f"the group of {self.name}s was not launched")
        started = time.monotonic()
        placement_s = min(self._placement_deadline_s, deadline_s)
        if not self._placement.wait(timeout_seconds=placement_s):
            free = ray.available_resources()
            raise DeadlineExceeded(
                stage="placement",
                waited_for=(
                    f"room for {self.size} x ({self._num_cpus:g} CPU, {self._num_gpus:g} GPU) for the {self.name}s "
                    f"beside what runs now ({free.get('CPU', 0.0):g} CPU, {free.get('GPU', 0.0):g} GPU are free)"
                ),
                deadline_s=placement_s,
                setting="deadlines.placement_s",
            )
        pids = self._building.wait(deadline_s=deadline_s - (time.monotonic() - started), setting=setting)
        self._pids, self._built = tuple(pids), True

    def start(self, *, deadline_s: float, setting: str) -> None:
        """Launch and wait."""
        self.launch()
        self.wait_ready(deadline_s=deadline_s, setting=setting)

    def ping(self, *, deadline_s: float, setting: str) -> None:
        """Every member is alive and, with a concurrency of 1, idle."""
        refs = {index: handle.ping.remote() for index, handle in enumerate(self.handles)}
        self._pending("barrier", refs).wait(deadline_s=deadline_s, setting=setting)

    def begin(self, method: str, *args: Any, **kwargs: Any) -> Pending:
        """Call all members with the same arguments without waiting."""
        return self.begin_each(method, [args] * self.size, **kwargs)

    def begin_each(self, method: str, args_list: Sequence[Sequence[Any]], **kwargs: Any) -> Pending:
        """Call member i with its own positional arguments `args_list[i]` without waiting."""
        if len(args_list) != self.size:
            raise ValueError(
                f"{method}: arguments for {len(args_list)} members, but there are {self.size} {self.name}s"
            )
        return self._pending(
            method, {i: self.handles[i].invoke.remote(method, *args, **kwargs) for i, args in enumerate(args_list)}
        )

    def begin_one(self, index: int, method: str, *args: Any, **kwargs: Any) -> Pending:
        return self._pending(method, {index: self.handles[index].invoke.remote(method, *args, **kwargs)})

    def call_and_read(self, method: str, attribute: str, *, deadline_s: float, setting: str) -> list[tuple[Any, Any]]:
        """Call all members and read an attribute right after it; (result, value) in member order."""
        refs = {i: handle.invoke_and_read.remote(method, attribute) for i, handle in enumerate(self.handles)}
        return self._pending(method, refs).wait(deadline_s=deadline_s, setting=setting)

    def call(self, method: str, *args: Any, deadline_s: float, setting: str, **kwargs: Any) -> list[Any]:
        """Call all members with the same arguments; results in member order. Errors as in `Pending.wait`."""
        return self.begin(method, *args, **kwargs).wait(deadline_s=deadline_s, setting=setting)

    def call_each(
        self, method: str, args_list: Sequence[Sequence[Any]], *, deadline_s: float, setting: str, **kwargs: Any
    ) -> list[Any]:
        """Call member i with its own arguments; results in member order."""
        return self.begin_each(method, args_list, **kwargs).wait(deadline_s=deadline_s, setting=setting)

    def call_one(self, index: int, method: str, *args: Any, deadline_s: float, setting: str, **kwargs: Any) -> Any:
        (value,) = self.begin_one(index, method, *args, **kwargs).wait(deadline_s=deadline_s, setting=setting)
        return value

    def close(self) -> None:
        """Let objects that have a `close` method end cleanly, then end the processes. A second call does nothing."""
        handles, self.handles = self.handles, ()
        placement, self._placement = self._placement, None
        if not ray.is_initialized():  # the cluster went first; any Ray call would now start or join another one
            return
        if self._built and handles:  # else there is no object yet, or not even a process, and nothing would answer
            closing = [handle.invoke.remote("close") for handle in handles]
            ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_S)
        for handle in handles:
            ray.kill(handle, no_restart=True)
        if placement is not None:
            remove_placement_group(placement)

    def _pending(self, method: str, refs: Mapping[int, Any]) -> Pending:
        return Pending(method, {ref: self.label(index) for index, ref in refs.items()})
