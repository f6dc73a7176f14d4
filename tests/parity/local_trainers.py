"""Real backends as replay drives them: one rank in this process, or two in a pool of processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from grpo_lib.algo.losses import build_loss
from grpo_lib.config import RunConfig
from grpo_lib.interfaces import InspectableTrainer
from grpo_lib.trainers.whole_model import dump_state, restore_state
from grpo_lib.types import StateKind, StepMetrics, StepPlan, WrittenFile
from tests.distributed.gloo_ranks import RankPool


class LocalTrainer:
    """`ReplayTrainer` of one rank."""

    num_ranks = 1
    has_reference = False

    def __init__(self, backend: InspectableTrainer, config: RunConfig, *, name: str) -> None:
        self.backend, self.name = backend, name
        self._loss = build_loss(config.algorithm)

    @property
    def policy_version(self) -> int:
        return self.backend.policy_version

    def forward_backward(self, plan: StepPlan, *, loss_denominator: float) -> StepMetrics:
        return self.backend.forward_backward(plan.micro_batches[0], self._loss, loss_denominator=loss_denominator)

    def optim_step(self) -> StepMetrics:
        return self.backend.optim_step()

    def logprobs(self, plan: StepPlan, *, reference: bool = False) -> tuple[tuple[torch.Tensor, ...], ...]:
        assert not reference
        return (tuple(self.backend.logprobs(batch) for batch in plan.micro_batches[0]),)

    def hidden_states(self, plan: StepPlan) -> tuple[tuple[dict[str, torch.Tensor], ...], ...]:
        return (tuple(dict(self.backend.hidden_states(batch)) for batch in plan.micro_batches[0]),)

    def dump_state(self, folder: Path, kinds: Sequence[StateKind]) -> None:
        dump_state(self.backend, folder, kinds)

    def restore_state(self, folder: Path) -> None:
        restore_state(self.backend, folder)

    def begin_save(self, path: Path) -> None:
        raise NotImplementedError("replay saves nothing")

    def written(self, *, wait: bool, deadline_s: float | None = None) -> tuple[WrittenFile, ...] | None:
        raise NotImplementedError("replay saves nothing")

    def load(self, path: Path) -> None:
        self.backend.load(path)

    def export_hf(self, path: Path) -> None:
        raise NotImplementedError("replay exports nothing")


def build_backend(name: str, config: RunConfig, model: Path, **options: Any) -> Any:
    """A real backend as `stages.trainer_rank.build_trainer` makes it, on one rank."""
    from grpo_lib.stages.trainer_rank import build_trainer

    changed = config.model_copy(
        update={"trainer": config.trainer.model_copy(update={"backend": name, "num_ranks": 1, **options})}
    )
    return build_trainer(changed, model, 0, trainable=True)


class PooledTrainer:
    """`ReplayTrainer` over the ranks of a pool, each of which keeps its backend between calls.

    Args:
        saboteur: Wraps each rank's backend; a class, so that it can be sent.
    """

    has_reference = False

    def __init__(
        self, pool: RankPool, config: RunConfig, model: Path, *, name: str, saboteur: Callable[[Any], Any] | None = None
    ) -> None:
        self.name, self.num_ranks = name, pool.num_ranks
        self._pool = pool
        pool.run(_build, name, config, model, saboteur)

    @property
    def policy_version(self) -> int:
        return self._call("policy_version")[0]

    def forward_backward(self, plan: StepPlan, *, loss_denominator: float) -> StepMetrics:
        return StepMetrics.merged(self._call("forward_backward", plan, loss_denominator))

    def optim_step(self) -> StepMetrics:
        return self._call("optim_step")[0]

    def logprobs(self, plan: StepPlan, *, reference: bool = False) -> tuple[tuple[torch.Tensor, ...], ...]:
        assert not reference
        return tuple(self._call("logprobs", plan))

    def hidden_states(self, plan: StepPlan) -> tuple[tuple[dict[str, torch.Tensor], ...], ...]:
        return tuple(self._call("hidden_states", plan))

    def dump_state(self, folder: Path, kinds: Sequence[StateKind]) -> None:
        self._call("dump_state", folder, kinds)

    def restore_state(self, folder: Path) -> None:
        self._call("restore_state", folder)

    def begin_save(self, path: Path) -> None:
        raise NotImplementedError("replay saves nothing")

    def written(self, *, wait: bool, deadline_s: float | None = None) -> tuple[WrittenFile, ...] | None:
        raise NotImplementedError("replay saves nothing")

    def load(self, path: Path) -> None:
        raise NotImplementedError("replay loads no checkpoint")

    def export_hf(self, path: Path) -> None:
        raise NotImplementedError("replay exports nothing")

    def _call(self, method: str, *args: Any) -> list[Any]:
        return self._pool.run(_call, self.name, method, args)


_BACKENDS: dict[str, Any] = {}  # of this rank, by trainer name
_LOSSES: dict[str, Any] = {}


def _build(
    rank: int, num_ranks: int, name: str, config: RunConfig, model: Path, saboteur: Callable[[Any], Any] | None
) -> None:
    from grpo_lib.stages.trainer_rank import build_trainer

    assert config.trainer.num_ranks == num_ranks
    backend = build_trainer(config, model, rank, trainable=True)
    _BACKENDS[name] = saboteur(backend) if saboteur else backend
    _LOSSES[name] = build_loss(config.algorithm)


def _call(rank: int, num_ranks: int, name: str, method: str, args: tuple[Any, ...]) -> Any:
    del num_ranks
    backend = _BACKENDS[name]
    if method == "policy_version":
        return backend.policy_version
    if method == "forward_backward":
        plan, denominator = args
        return backend.forward_backward(plan.micro_batches[rank], _LOSSES[name], loss_denominator=denominator)
    if method == "optim_step":
        return backend.optim_step()
    if method == "logprobs":
        return tuple(backend.logprobs(batch) for batch in args[0].micro_batches[rank])
    if method == "hidden_states":
        return tuple(dict(backend.hidden_states(batch)) for batch in args[0].micro_batches[rank])
    return {"dump_state": dump_state, "restore_state": restore_state}[method](backend, *args)
