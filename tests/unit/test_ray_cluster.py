"""Demands that cannot be met are refused with figures, before any process starts."""

from __future__ import annotations

import os

import pytest
import ray

from grpo_lib.config import RuntimeConfig
from grpo_lib.errors import PreflightError
from grpo_lib.ray_runtime.cluster import ResourceDemand, check_demands, local_cluster

RANKS = ResourceDemand(name="trainer rank", count=2, cpus=0.5, gpus=0.0)
ENGINE = ResourceDemand(name="engine", count=1, cpus=1.0, gpus=0.0)


def test_what_fits_exactly_is_accepted() -> None:
    check_demands([RANKS, ENGINE], cpus=2.0, gpus=0.0)


def test_shortfall_is_given_in_numbers() -> None:
    with pytest.raises(PreflightError) as caught:
        check_demands([RANKS, ENGINE], cpus=1.0, gpus=0.0)
    message = str(caught.value)
    assert message.startswith("2 CPUs are asked for and 1 exist: 1 short.")
    assert "2 x trainer rank (0.5 CPU, 0 GPU each) + 1 x engine (1 CPU, 0 GPU each)" in message
    assert "trainer.num_ranks" in message
    gpu = ResourceDemand(name="engine", count=4, cpus=8.0, gpus=2.0)
    with pytest.raises(PreflightError, match=r"32 CPUs .* 28 short; 8 GPUs are asked for and 1 exist: 7 short"):
        check_demands([gpu], cpus=4.0, gpus=1.0)


def test_nothing_is_started_for_demands_that_cannot_be_met() -> None:
    before = dict(os.environ)
    impossible = ResourceDemand(name="engine", count=1000, cpus=1000.0, gpus=0.0)
    with (
        pytest.raises(PreflightError, match=r"1e\+06 CPUs are asked for"),
        local_cluster(RuntimeConfig(), demands=[impossible]),
    ):
        pass
    assert not ray.is_initialized()
    assert dict(os.environ) == before
