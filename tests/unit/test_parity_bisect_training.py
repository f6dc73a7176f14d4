"""Gradient and update of one step, bisected from scripted tensors; AdamW against PyTorch's."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from grpo_lib.algo.faults import Fault
from grpo_lib.config import RunConfig, TrainerConfig, with_overrides
from grpo_lib.parity.bisect import Cause, Finding
from grpo_lib.parity.bisect_training import (
    TakenStep,
    adamw_update,
    bisect_gradient,
    bisect_head,
    bisect_update,
    configured_learning_rate,
    gradient_distance,
    update_distance,
)
from grpo_lib.recipes import embedded_addition
from grpo_lib.types import PackedBatch, StateKind, StepPlan
from tests.unit.bisect_parts import ScriptedReference, scripted_plan

SHAPES = {"model.embed_tokens.weight": (60, 24), "model.layers.0.mlp.weight": (40, 30), "model.norm.weight": (16,)}
CONFIG = with_overrides(embedded_addition(), ["loop.steps=10", "trainer.weight_decay=0.1", "trainer.adam_eps=1e-6"])


class Tensors:
    """`TensorReader` over a dict."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.names = tuple(tensors)

    def __call__(self, name: str) -> torch.Tensor:
        return self._tensors[name]


class LinearReference(ScriptedReference):
    """A document's gradient is its advantage times random tensors of its own, over the denominator."""

    def gradient(
        self, batches: Sequence[PackedBatch], loss: Any, *, loss_denominator: float, fault: Fault
    ) -> Mapping[str, torch.Tensor]:
        total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        for batch in batches:
            for row, sample_ids in enumerate(batch.sample_ids):
                for doc_id in range(1, len(sample_ids) + 1):
                    places = batch.doc_ids[row] == doc_id
                    tokens, mask = batch.input_ids[row, places], batch.response_mask[row, places]
                    advantage = float(batch.advantages[row, places][mask][0])
                    generator = torch.Generator().manual_seed(zlib.crc32(tokens.numpy().tobytes()))
                    for name, shape in SHAPES.items():
                        total[name] += advantage / loss_denominator * torch.randn(shape, generator=generator).double()
        if fault.head_detached:
            inputs = torch.cat([batch.input_ids[batch.doc_ids > 0] for batch in batches])
            is_input = torch.zeros(60, dtype=torch.bool).index_fill(0, inputs, True)
            total["model.embed_tokens.weight"][~is_input] = 0
        return total


REFERENCE = LinearReference(tied_embedding="model.embed_tokens.weight")


def right_gradient(plan: StepPlan, fault: Fault = Fault()) -> dict[str, torch.Tensor]:  # noqa: B008 - frozen
    batches = [batch for rank in plan.micro_batches for batch in rank]
    found = REFERENCE.gradient(batches, None, loss_denominator=float(plan.num_trained_tokens), fault=fault)
    return {name: tensor.float() for name, tensor in found.items()}


def taken(
    gradient: Mapping[str, torch.Tensor] | None = None,
    *,
    plan: StepPlan | None = None,
    config: RunConfig = CONFIG,
    version: int = 2,
    after: Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    version_after: int | None = None,
) -> TakenStep:
    """A step with AdamW's update, or what `after(name, weight, update)` makes of it."""
    plan = plan or scripted_plan()
    generator = torch.Generator().manual_seed(1)

    def state(size: float) -> dict[str, torch.Tensor]:
        return {name: size * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}

    weights, first = state(0.2), state(0.01)
    second = {name: tensor.abs() for name, tensor in state(1e-4).items()}
    step = TakenStep(
        name="suspect",
        config=config,
        plan=plan,
        scores={},
        version_before=version,
        version_after=version + 1 if version_after is None else version_after,
        learning_rate=1e-3,
        start={
            StateKind.WEIGHT: Tensors(weights),
            StateKind.FIRST_MOMENT: Tensors(first),
            StateKind.SECOND_MOMENT: Tensors(second),
        },
        gradient=Tensors(gradient or right_gradient(plan)),
        after=Tensors({}),
    )
    torch.manual_seed(2)  # of what `after` may draw
    clip = min(1.0, config.trainer.max_grad_norm / (_norm(step.gradient) + 1e-6))
    change = after or (lambda _, weight, update: weight + update)
    updated = {
        name: change(name, weights[name].double(), adamw_update(step, name, 1e-3, clip)).float() for name in SHAPES
    }
    return replace(step, after=Tensors(updated))


def _norm(gradient: Any) -> float:
    return math.sqrt(sum(float(gradient(name).double().square().sum()) for name in SHAPES))


def of_gradient(step: TakenStep) -> Finding | None:
    found = bisect_gradient(step, REFERENCE, gradient_distance(step, REFERENCE)).findings
    assert len(found) <= 1
    return found[0] if found else None


def of_update(step: TakenStep) -> Finding | None:
    found = bisect_update(step, update_distance(step)).findings
    assert len(found) <= 1
    return found[0] if found else None


# -- gradient ----------------------------------------------------------------------------------------------------------


def with_advantages(plan: StepPlan, change: Callable[[str, float], float]) -> StepPlan:
    """The plan with other advantages, `change(sample id, advantage)`."""

    def changed(batch: PackedBatch) -> PackedBatch:
        advantages = batch.advantages.clone()
        for row, sample_ids in enumerate(batch.sample_ids):
            for doc_id, sample_id in enumerate(sample_ids, start=1):
                places = (batch.doc_ids[row] == doc_id) & batch.response_mask[row]
                advantages[row, places] = change(sample_id, float(batch.advantages[row, places][0]))
        return replace(batch, advantages=advantages)

    return replace(plan, micro_batches=tuple(tuple(changed(batch) for batch in rank) for rank in plan.micro_batches))


def advantages_of(plan: StepPlan) -> dict[str, float]:
    found: dict[str, float] = {}
    with_advantages(plan, lambda sample_id, value: found.setdefault(sample_id, value))
    return found


def test_a_right_step_has_no_finding() -> None:
    assert of_gradient(taken()) is None
    assert of_update(taken()) is None


def test_a_gradient_of_another_length_is_a_denominator_with_its_factor() -> None:
    plan = scripted_plan(num_ranks=2)
    doubled = {name: 2 * tensor for name, tensor in right_gradient(plan).items()}
    finding = of_gradient(taken(doubled, plan=plan))
    assert finding is not None
    assert finding.cause is Cause.LOSS_DENOMINATOR
    assert "2 times as long: the number of ranks" in finding.evidence
    assert finding.unexplained < 1e-3


@pytest.mark.parametrize("part", ["rank", "micro-batch", "document"])
def test_sums_over_parts_of_a_step_are_named_by_part(part: str) -> None:
    plan = scripted_plan(23, num_ranks=2)
    keys: dict[str, Any] = {}
    tokens: dict[Any, int] = {}
    for rank, batches in enumerate(plan.micro_batches):
        for index, batch in enumerate(batches):
            for row, sample_ids in enumerate(batch.sample_ids):
                for doc_id, sample_id in enumerate(sample_ids, start=1):
                    key = {"rank": rank, "micro-batch": (rank, index), "document": sample_id}[part]
                    keys[sample_id] = key
                    count = int((batch.response_mask[row] & (batch.doc_ids[row] == doc_id)).sum())
                    tokens[key] = tokens.get(key, 0) + count
    wrong = with_advantages(plan, lambda key, value: value * plan.num_trained_tokens / tokens[keys[key]])
    finding = of_gradient(taken(right_gradient(wrong), plan=plan))
    assert finding is not None
    assert finding.cause is Cause.LOSS_DENOMINATOR, finding
    assert f"tokens of each {part} ({len(tokens)} of them), summed" in finding.where


def test_swapped_groups_are_named() -> None:
    plan = scripted_plan()
    true = advantages_of(plan)
    partner = {"e0.p0": "e0.p2", "e0.p2": "e0.p0", "e0.p1": "e0.p1"}
    swapped = with_advantages(plan, lambda key, _: true[f"{partner[key[:5]]}{key[5:]}"])
    finding = of_gradient(taken(right_gradient(swapped), plan=plan))
    assert finding is not None
    assert (finding.cause, finding.where) == (Cause.ADVANTAGES_SWAPPED, "groups e0.p0 and e0.p2")


@pytest.mark.parametrize(("factor", "says"), [(0.0, "times 0"), (-1.0, "times -1"), (3.0, "times 3")])
def test_changed_advantages_are_named_by_document(factor: float, says: str) -> None:
    plan = scripted_plan()
    some = {"e0.p1/0", "e0.p2/3"}
    changed = with_advantages(plan, lambda key, value: value * factor if key in some else value)
    step = taken(right_gradient(changed), plan=plan)
    finding = of_gradient(step)
    assert finding is not None
    assert finding.cause is Cause.ADVANTAGES_CHANGED
    assert all(sample_id in finding.where for sample_id in some)
    assert finding.where.startswith("2 documents")
    assert says in finding.evidence
    rows = bisect_gradient(step, REFERENCE, gradient_distance(step, REFERENCE)).tables["advantages"]
    true = advantages_of(plan)
    for row in rows:
        assert row["trained_with"] == pytest.approx(factor * true[str(row["documents"])], abs=1e-4)


def test_rounding_changes_no_advantage() -> None:
    """Under a tolerance that rounding breaks, a step is unexplained, not a mistake."""
    plan = scripted_plan()
    some = {"e0.p1/0", "e0.p2/3"}
    rounded = with_advantages(plan, lambda key, value: value * (1 + 8e-4) if key in some else value)
    step = taken(right_gradient(rounded), plan=plan)
    found = bisect_gradient(step, REFERENCE, gradient_distance(step, REFERENCE)).findings
    assert {finding.cause for finding in found} <= {Cause.UNEXPLAINED}


def test_a_gradient_that_is_no_sum_of_documents_is_unexplained() -> None:
    noise = {
        name: tensor + 0.02 * torch.randn(tensor.shape) for name, tensor in right_gradient(scripted_plan()).items()
    }
    finding = of_gradient(taken(noise))
    assert finding is not None
    assert finding.cause is Cause.UNEXPLAINED


def test_an_untied_head_shows_in_the_embedding_also_where_all_else_is_wrong() -> None:
    plan = scripted_plan()
    untied = right_gradient(plan, Fault(head_detached=True))
    (finding,) = bisect_head(taken(untied, plan=plan), REFERENCE).findings
    assert finding.cause is Cause.HEAD_UNTIED
    assert "without the output head's part" in finding.evidence
    drifted = {name: 1.3 * tensor for name, tensor in untied.items()}
    (finding,) = bisect_head(taken(drifted, plan=plan), REFERENCE).findings
    assert "tokens that are no input are exactly 0" in finding.evidence
    assert bisect_head(taken(plan=plan), REFERENCE).findings == ()


# -- update ------------------------------------------------------------------------------------------------------------


def test_adamw_is_pytorchs() -> None:
    step = taken(version=4)
    clip = 0.3
    for name in SHAPES:
        weight = torch.nn.Parameter(step.start[StateKind.WEIGHT](name).double())
        weight.grad = clip * step.gradient(name).double()
        config = CONFIG.trainer
        adamw = torch.optim.AdamW(
            [weight],
            lr=2e-3,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
        )
        adamw.state[weight] = {
            "step": torch.tensor(4.0),
            "exp_avg": step.start[StateKind.FIRST_MOMENT](name).double(),
            "exp_avg_sq": step.start[StateKind.SECOND_MOMENT](name).double(),
        }
        before = weight.detach().clone()
        adamw.step()
        torch.testing.assert_close(
            adamw_update(step, name, 2e-3, clip), weight.detach() - before, rtol=1e-9, atol=1e-12
        )


@pytest.mark.parametrize(
    ("scheduler", "rates"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1, 1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
    ],
)
def test_schedules_mean_what_their_names_say(scheduler: Any, rates: list[float]) -> None:
    config = TrainerConfig(learning_rate=2.0, lr_scheduler=scheduler, warmup_steps=2)
    found = [configured_learning_rate(config, step, total_steps=6) for step in range(6)]
    np.testing.assert_allclose(found, [2 * rate for rate in rates], rtol=1e-12)


def test_an_update_of_another_length_is_a_learning_rate_and_a_schedule() -> None:
    finding = of_update(taken(after=lambda _, weight, update: weight + 0.8 * update))
    assert finding is not None
    assert finding.cause is Cause.LEARNING_RATE
    assert "0.0008 where constant gives 0.001, which is what the schedule linear gives there" in finding.evidence
    finding = of_update(taken(after=lambda _, weight, update: weight + 3 * update))
    assert finding is not None
    assert "a learning rate of 0.003" in finding.evidence
    assert "which is what" not in finding.evidence


def test_a_step_that_moved_nothing_or_does_not_count_is_skipped() -> None:
    finding = of_update(taken(after=lambda _, weight, update: weight))
    assert finding is not None
    assert (finding.cause, finding.where) == (Cause.STEP_SKIPPED, "step from version 2 to 3")
    finding = of_update(taken(version_after=2))
    assert finding is not None
    assert finding.cause is Cause.STEP_SKIPPED
    assert "it is at version 2" in finding.evidence


def test_masters_in_bfloat16_are_named_and_a_base_model_in_bfloat16_is_not() -> None:
    finding = of_update(taken(after=lambda _, weight, update: (weight + update).bfloat16()))
    assert finding is not None
    assert finding.cause is Cause.ROUNDED_MASTERS
    assert of_update(taken(after=lambda _, weight, update: weight + update)) is None


def test_another_update_is_unexplained() -> None:
    finding = of_update(taken(after=lambda _, weight, update: weight + update + 1e-4 * torch.randn(weight.shape)))
    assert finding is not None
    assert finding.cause is Cause.UNEXPLAINED
