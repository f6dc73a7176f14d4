"""Waiting for rollouts is charged to `wait_for_rollouts_s` in every backend, and changes nobody's compute.

The loop's own functions drive real backends under one `StepTimer`. Its clock is virtual, so that the figures are exact:
it advances by what the rollout source takes, by a second for each forward pass of the real model and by a quarter for
each step of the real AdamW.

Functions whose name does not start with `test_` run in the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from grpo_lib.algo.losses import build_loss
from grpo_lib.config import RunConfig
from grpo_lib.interfaces import InspectableTrainer
from grpo_lib.loop import plan_rollouts, train_step
from grpo_lib.pipeline import RolloutPipeline
from grpo_lib.timing import StepTimer
from grpo_lib.types import Completion, StepMetrics, StepPlan
from tests.distributed.gloo_ranks import RankPool
from tests.distributed.trainer_cases import BACKENDS, BackendCase
from tests.unit.fakes import STOP, FakeEngine, FakePrompts, FakeVerifiers, mixed, small_config

FORWARD_S, ADAMW_S = 1.0, 0.25
NUM_STEPS = 2
NUM_POLLS = 3  # of the slow engine: eight completions, three at a time


@dataclass
class VirtualClock:
    """Seconds that pass only when somebody says so."""

    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


class SlowEngine(FakeEngine):
    """Takes `delay_s` for each answer."""

    def __init__(self, clock: VirtualClock, delay_s: float) -> None:
        super().__init__(journal=[])
        self._clock, self._delay_s = clock, delay_s

    def poll(self, timeout_s: float) -> list[Completion]:
        self._clock.advance(self._delay_s)
        return super().poll(timeout_s)


class OneRank:
    """The `TrainerGroup` methods that a step uses, over one real rank in this process."""

    num_ranks = 1
    has_reference = False

    def __init__(self, backend: InspectableTrainer, config: RunConfig) -> None:
        self._backend, self._loss = backend, build_loss(config.algorithm)

    @property
    def policy_version(self) -> int:
        return self._backend.policy_version

    def forward_backward(self, plan: StepPlan, *, loss_denominator: float) -> StepMetrics:
        return self._backend.forward_backward(plan.micro_batches[0], self._loss, loss_denominator=loss_denominator)

    def optim_step(self) -> StepMetrics:
        return self._backend.optim_step()


def spell(token_ids: Sequence[int]) -> str:
    return " ".join(str(i) for i in token_ids if i != STOP)


def step_times(
    rank: int, num_ranks: int, case: BackendCase, model: Path, delay_s: float
) -> list[tuple[int, dict[str, float]]]:
    """For each step its number of micro-batches, and where its seconds went."""
    config = small_config(trainer={"num_ranks": 1, "pack_length": 16, "micro_batch_packs": 2})
    clock = VirtualClock()
    backend: Any = case.build(rank, num_ranks, model)
    backend._model.register_forward_pre_hook(lambda module, args: clock.advance(FORWARD_S))
    backend._optimizer.adamw.register_step_post_hook(lambda *args: clock.advance(ADAMW_S))
    engine = SlowEngine(clock, delay_s)
    pipeline = RolloutPipeline(
        config=config,
        engine=engine,
        prompts=FakePrompts(),
        verifiers=FakeVerifiers(mixed),
        decode=spell,
        stop_token_ids=(STOP,),
    )
    trainer: Any = OneRank(backend, config)
    timer = StepTimer(clock)
    steps = []
    for _ in range(NUM_STEPS):
        engine.version = trainer.policy_version
        rollouts = pipeline.next_batch(trainer.policy_version, timer)
        plan = plan_rollouts(config, trainer.num_ranks, rollouts)
        assert plan is not None
        train_step(config, trainer, plan, timer)
        steps.append((len(plan.micro_batches[0]), timer.finish_step()))
    assert trainer.policy_version == NUM_STEPS
    return steps


@pytest.fixture(scope="module")
def times(
    one_rank: RankPool, tiny_models: dict[str, Path]
) -> dict[tuple[str, float], list[tuple[int, dict[str, float]]]]:
    """(backend, seconds of each answer) → its steps."""
    return {
        (case.name, delay_s): one_rank.run(step_times, case, tiny_models["qwen3_tied"], delay_s)[0]
        for case in BACKENDS
        for delay_s in (0.0, 5.0)
    }


@pytest.mark.parametrize("case", BACKENDS, ids=lambda case: case.name)
def test_a_slow_source_is_waited_for_and_changes_no_compute(times: Any, case: BackendCase) -> None:
    for (num_batches, slow), (_, fast) in zip(times[case.name, 5.0], times[case.name, 0.0], strict=True):
        assert slow["wait_for_rollouts_s"] == NUM_POLLS * 5.0
        assert fast["wait_for_rollouts_s"] == 0
        for step in (slow, fast):
            assert step["forward_backward_s"] == num_batches * FORWARD_S > FORWARD_S
            assert step["optim_s"] == ADAMW_S
            assert step["other_s"] == 0
        assert slow["step_s"] - fast["step_s"] == NUM_POLLS * 5.0


def test_all_backends_have_the_same_spans(times: Any) -> None:
    for delay_s in (0.0, 5.0):
        assert all(times[case.name, delay_s] == times[BACKENDS[0].name, delay_s] for case in BACKENDS)
