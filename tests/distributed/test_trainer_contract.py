"""The contract of a trainer backend, against Hugging Face's model run document by document.

Every backend in `BACKENDS` is measured once per way of splitting a step, and the tests read those records.
Tolerances are relative to the largest entry of what is compared: 1e-5, about 80 units in the last place of fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from grpo_lib.algo.packing import pack, plan_step
from grpo_lib.types import StepPlan
from tests.distributed.gloo_ranks import RankPool
from tests.distributed.judge import Verdicts, judge
from tests.distributed.trainer_cases import (
    BACKENDS,
    CONFIG,
    CORRECTION_CAP,
    PACK_LENGTH,
    TEMPERATURE,
    TOTAL_STEPS,
    BackendCase,
    Record,
    merge,
    padding_batch,
    record,
    samples,
)

RTOL = 1e-5
NUM_STEPS = 5
FAMILIES = ("qwen3_tied", "llama", "olmo2")
SPLITS = ("one rank, one micro-batch", "two ranks, a pack each time", "two ranks, one of them idle")


def split(name: str) -> StepPlan:
    """The same nine documents as different work."""
    if name == "two ranks, a pack each time":
        return plan_step(samples(), num_ranks=2, pack_length=PACK_LENGTH, micro_batch_packs=1)
    whole = plan_step(samples(), num_ranks=1, pack_length=PACK_LENGTH, micro_batch_packs=8)
    if name == "one rank, one micro-batch":
        assert len(whole.micro_batches[0]) == 1
        return whole
    everything = pack(samples(), PACK_LENGTH)
    return replace(whole, micro_batches=((everything,), (padding_batch(everything.num_rows),)))


@pytest.fixture(scope="module")
def verdicts(tiny_models: dict[str, Path]) -> dict[str, Verdicts]:
    return {
        family: judge(
            tiny_models[family],
            samples(),
            CONFIG,
            temperature=TEMPERATURE,
            cap=CORRECTION_CAP,
            total_steps=TOTAL_STEPS,
            num_steps=NUM_STEPS,
        )
        for family in FAMILIES
    }


@pytest.fixture(scope="module", params=BACKENDS, ids=lambda case: case.name)
def records(
    request: pytest.FixtureRequest, one_rank: RankPool, two_ranks: RankPool, tiny_models: dict[str, Path]
) -> dict[tuple[str, str], Record]:
    case: BackendCase = request.param
    result = {}
    for family in FAMILIES:
        for name in SPLITS:
            plan = split(name)
            pool = one_rank if len(plan.micro_batches) == 1 else two_ranks
            result[family, name] = merge(pool.run(record, case, tiny_models[family], plan, NUM_STEPS))
    return result


@pytest.fixture(params=[(family, name) for family in FAMILIES for name in SPLITS], ids=", ".join)
def pair(
    request: pytest.FixtureRequest, records: dict[tuple[str, str], Record], verdicts: dict[str, Verdicts]
) -> tuple[Record, Verdicts]:
    return records[request.param], verdicts[request.param[0]]


def assert_close(actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        scale = float(np.abs(values).max())
        difference = float(np.abs(actual[name] - values).max())
        assert difference <= RTOL * scale, f"{name}: {difference:.2e} at scale {scale:.2e}"


def test_log_probabilities_equal_those_of_each_document_alone(pair: tuple[Record, Verdicts]) -> None:
    assert_close(pair[0].logprobs, pair[1].logprobs)


def test_loss_and_entropy_are_the_token_means(pair: tuple[Record, Verdicts]) -> None:
    metrics, expected = pair[0].metrics.values(), pair[1]
    assert metrics["loss/policy"] == pytest.approx(np.mean(expected.token_losses), rel=RTOL)
    assert metrics["policy/entropy"] == pytest.approx(np.mean(expected.entropies), rel=RTOL)


def test_every_gradient_equals_the_plain_loop_by_its_name(pair: tuple[Record, Verdicts]) -> None:
    assert_close(pair[0].gradients, pair[1].gradients)


def test_gradient_norm_is_global_and_taken_before_clipping(pair: tuple[Record, Verdicts]) -> None:
    norms = [step["optim/grad_norm"] for step in pair[0].steps]
    assert norms == pytest.approx(pair[1].grad_norms, rel=RTOL)
    assert min(norms) > 2 * CONFIG.max_grad_norm, "clipping must be active in this test"


@pytest.mark.parametrize("num_steps", [1, NUM_STEPS])
def test_weights_after_optimiser_steps(pair: tuple[Record, Verdicts], num_steps: int) -> None:
    assert_close(pair[0].weights[num_steps], pair[1].weights[num_steps])


def test_each_step_is_one_real_optimiser_step(pair: tuple[Record, Verdicts]) -> None:
    steps = pair[0].steps
    assert pair[0].versions == list(range(NUM_STEPS + 1))
    assert [step["optim/weights_moved"] for step in steps] == [1.0] * NUM_STEPS
    assert [step["optim/update_rms"] for step in steps] == pytest.approx(pair[1].update_rms, rel=1e-3)


def test_learning_rate_is_the_configured_schedule(pair: tuple[Record, Verdicts]) -> None:
    assert [step["optim/lr"] for step in pair[0].steps] == pytest.approx(pair[1].learning_rates, rel=1e-12)


def test_the_comparison_notices_a_wrong_gradient(pair: tuple[Record, Verdicts]) -> None:
    doubled = {name: 2 * gradient for name, gradient in pair[0].gradients.items()}
    with pytest.raises(AssertionError, match="at scale"):
        assert_close(doubled, pair[1].gradients)
