"""All engines behind one front: a `RolloutEngine` whose requests are spread over actors."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray

from grpo_lib.config import DeadlinesConfig
from grpo_lib.errors import DeadlineExceeded, StalenessError
from grpo_lib.ray_runtime.actor_group import ActorGroup, Pending
from grpo_lib.ray_runtime.parcels import CompletionParcel
from grpo_lib.ray_runtime.weight_client import RayWeightClient
from grpo_lib.types import Completion, GenerationRequest, WeightReceipt

_GENERATE = "deadlines.generate_s"
_SYNC = "deadlines.weight_sync_s"
_POLL_S = 1.0  # how long an engine holds a poll open when nothing finishes
_MIN_CONCURRENCY = 3  # a poll held open, a command, and a ping


class EngineHost:
    """An engine in its actor: everything is the engine's own, but what it polls travels as one parcel."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        self._engine = factory()

    def poll(self, timeout_s: float) -> CompletionParcel:
        return CompletionParcel(self._engine.poll(timeout_s))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def engine_actors(
    factories: Sequence[Callable[[], Any]], *, num_cpus: float, max_concurrency: int = 4, **options: Any
) -> ActorGroup:
    """The actors of an `EngineGroup`, one for each factory; `options` are those of `ActorGroup`."""
    hosts = [partial(EngineHost, factory) for factory in factories]
    return ActorGroup("engine", hosts, num_cpus=num_cpus, max_concurrency=max_concurrency, **options)


class EngineGroup:
    """Driver-side front of engine actors. Not thread-safe: one thread of the driver uses it.

    Args:
        group: Made by `engine_actors`; hosts `RolloutEngine` objects that also take vLLM's weight-transfer calls. Needs
            a concurrency of at least 3, because polls wait inside the actor.
        workers_per_engine: Processes of one engine that each hold a share of the weights.
    """

    def __init__(self, group: ActorGroup, *, deadlines: DeadlinesConfig, workers_per_engine: int = 1) -> None:
        if group.max_concurrency < _MIN_CONCURRENCY:
            raise ValueError(f"engines need max_concurrency >= {_MIN_CONCURRENCY}, not {group.max_concurrency}")
        self._group, self._deadlines, self._workers_per_engine = group, deadlines, workers_per_engine
        self._owner: dict[str, int] = {}  # request id in flight → engine
        self._polls: dict[Any, int] = {}  # poll under way → engine
        self._set_aside: list[Completion] = []  # arrived while somebody waited for others

    @property
    def num_engines(self) -> int:
        return self._group.size

    @property
    def processes(self) -> dict[str, int]:
        """Process id by engine, each on its own machine."""
        return self._group.processes

    # -- generating ------------------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """The version that all engines report.

        Raises:
            StalenessError: they differ.
        """
        versions = self.policy_versions()
        if len(set(versions)) != 1:
            raise StalenessError(f"engines hold different policy versions: {list(versions)}")
        return versions[0]

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Requests with equal prompts go to the same engine, which then computes the prompt once."""
        routed = self._route(requests)
        pending = [self._group.begin_one(index, "submit", batch) for index, batch in routed.items()]
        self._ensure_polls(routed)
        for call in pending:
            call.wait(deadline_s=self._deadlines.generate_s, setting=_GENERATE)
        self._owner.update((request.request_id, index) for index, batch in routed.items() for request in batch)

    def poll(self, timeout_s: float) -> list[Completion]:
        if self._set_aside:
            completions, self._set_aside = self._set_aside, []
            return completions
        return self._receive(timeout_s)

    def generate(
        self, requests: Sequence[GenerationRequest], *, deadline_s: float | None = None
    ) -> Iterator[Completion]:
        """Submit, and yield these requests' completions as they finish.

        Raises:
            DeadlineExceeded: names the engines that still hold requests.
        """
        self.submit(requests)
        return self._await(requests, self._deadlines.generate_s if deadline_s is None else deadline_s)

    def decode_everywhere(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """Every engine decodes every request; results by engine. For canaries: no engine may be taken on trust."""
        limit_s = self._deadlines.generate_s
        results: list[list[Completion]] = []
        for index in range(self.num_engines):
            self._group.call_one(index, "submit", requests, deadline_s=limit_s, setting=_GENERATE)
            self._owner.update((request.request_id, index) for request in requests)
            results.append(list(self._await(requests, limit_s)))
        return results

    def _await(self, requests: Sequence[GenerationRequest], limit_s: float) -> Iterator[Completion]:
        """Completions of these requests; those of others are set aside for the next `poll`."""
        deadline = time.monotonic() + limit_s
        outstanding = {request.request_id for request in requests}
        while outstanding:
            for completion in self._receive(max(min(_POLL_S, deadline - time.monotonic()), 0.0)):
                if completion.request_id not in outstanding:
                    self._set_aside.append(completion)
                    continue
                outstanding.discard(completion.request_id)
                yield completion
            if outstanding and time.monotonic() > deadline:
                held = Counter(self._group.label(self._owner[key]) for key in outstanding)
                raise DeadlineExceeded(
                    stage="rollouts",
                    waited_for=", ".join(f"{count} completions of {engine}" for engine, count in sorted(held.items())),
                    deadline_s=limit_s,
                    setting=_GENERATE,
                )

    def _receive(self, timeout_s: float) -> list[Completion]:
        """What engines finished since the last call; waits for the first."""
        self._ensure_polls(set(self._owner.values()))
        if not self._polls:
            time.sleep(timeout_s)
            return []
        ready, _ = ray.wait(list(self._polls), num_returns=1, timeout=timeout_s)
        if len(self._polls) > 1:
            ready, _ = ray.wait(list(self._polls), num_returns=len(self._polls), timeout=0)
        completions: list[Completion] = []
        for ref in ready:
            index = self._polls.pop(ref)
            (polled,) = Pending("poll", {ref: self._group.label(index)}).wait(
                deadline_s=self._deadlines.generate_s, setting=_GENERATE
            )
            completions += polled
        for completion in completions:
            self._owner.pop(completion.request_id, None)
        self._ensure_polls(set(self._owner.values()))
        return completions

    def score(self, sequences: Sequence[tuple[Sequence[int], int]]) -> list[np.ndarray]:
        """Scores in the given order, computed by all engines side by side."""
        shares = [sequences[index :: self.num_engines] for index in range(self.num_engines)]
        parts = self._group.call_each(
            "score", [(share,) for share in shares], deadline_s=self._deadlines.generate_s, setting=_GENERATE
        )
        scores: list[np.ndarray] = [np.zeros(0, np.float32)] * len(sequences)
        for index, part in enumerate(parts):
            scores[index :: self.num_engines] = part
        return scores

    # -- pausing and weights ---------------------------------------------------------------------------------------

    def arrive(self, *, deadline_s: float, setting: str) -> None:
        self._group.ping(deadline_s=deadline_s, setting=setting)

    def pause(self) -> None:
        self._call("pause")

    def resume(self) -> None:
        self._call("resume")

    def sleep(self) -> None:
        self._call("sleep")

    def wake(self) -> None:
        self._call("wake")

    def load_weights(self, path: Path, policy_version: int) -> None:
        self._call("load_weights", path, policy_version)

    def weight_client(self) -> RayWeightClient:
        return RayWeightClient(
            self._group.handles,
            [self._group.label(index) for index in range(self.num_engines)],
            workers_per_engine=self._workers_per_engine,
            deadline_s=self._deadlines.weight_sync_s,
        )

    def checkpoint_names(self) -> tuple[frozenset[str], ...]:
        return tuple(self._call("checkpoint_names"))

    def commit_weights(self, policy_version: int) -> tuple[WeightReceipt, ...]:
        return tuple(receipt for receipts in self._call("commit_weights", policy_version) for receipt in receipts)

    def policy_versions(self) -> tuple[int, ...]:
        return tuple(self._call("policy_version"))

    def close(self) -> None:
        self._group.close()

    def _call(self, method: str, *args: Any) -> list[Any]:
        return self._group.call(method, *args, deadline_s=self._deadlines.weight_sync_s, setting=_SYNC)

    # -- routing ---------------------------------------------------------------------------------------------------

    def _route(self, requests: Sequence[GenerationRequest]) -> dict[int, list[GenerationRequest]]:
        """Engine → requests: each distinct prompt goes to the engine with the fewest requests so far."""
        load = Counter(dict.fromkeys(range(self.num_engines), 0))
        load.update(self._owner.values())
        of_prompt: dict[tuple[int, ...], int] = {}
        routed: dict[int, list[GenerationRequest]] = {}
        for request in requests:
            index = of_prompt.get(request.prompt_token_ids)
            if index is None:
                index = min(load, key=lambda engine: (load[engine], engine))
                of_prompt[request.prompt_token_ids] = index
            load[index] += 1
            routed.setdefault(index, []).append(request)
        return routed

    def _ensure_polls(self, engines: Sequence[int] | set[int] | dict[int, Any]) -> None:
        """One poll is under way on every engine that holds requests, so that results travel as they finish."""
        polled = set(self._polls.values())
        for index in engines:
            if index not in polled:
                self._polls[self._group.handles[index].invoke.remote("poll", _POLL_S)] = index
