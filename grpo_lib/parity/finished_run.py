"""One finished run, as far as a comparison of runs needs it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_lib.config import RunConfig, flat
from grpo_lib.errors import DataError
from grpo_lib.parity.verdicts import MetricRow, listed
from grpo_lib.types import GroupStatus

WARM_UP_STEPS = 5
# Sections and settings that do not decide what is learned, but how fast or where. By invariant, the split into ranks,
# packs and micro-batches is among them.
FREE = frozenset(
    {
        "recipe", "seed", "storage", "tracking", "deadlines", "runtime", "parity",
        "trainer.backend", "trainer.num_ranks", "trainer.pack_length", "trainer.micro_batch_packs",
        "trainer.logprob_chunk_tokens", "trainer.bucket_mib", "trainer.zero_stage", "trainer.activation_checkpointing",
        "trainer.activation_memory_budget", "trainer.compile", "trainer.logprob_recompute",
        "rollout.num_engines", "rollout.tensor_parallel_size", "rollout.max_num_seqs", "rollout.kv_cache_mib",
        "rollout.prefix_caching", "verifier.num_workers", "weight_sync.backend", "weight_sync.port",
        "weight_sync.canary_every", "weight_sync.canary_prompts", "weight_sync.canary_tolerance",
        "loop.checkpoint_every", "loop.keep_checkpoints", "loop.keep_every",
        "evaluation.bootstrap_resamples", "evaluation.confidence",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FinishedRun:
    """What a run recorded, without its files."""

    name: str  # as the user named it
    folder: str  # tells apart what is one run under two names
    config: RunConfig
    lineage: Mapping[str, Any]
    rows: Sequence[MetricRow]  # one per step
    accuracy: float | None  # held-out sampled pass@1 of the trained policy; None where nothing was judged
    correct_by_prompt: Mapping[str, float]  # prompt id → share of correct samples; NaN where none was judged
    dataset_sha256: str
    first_samples: str  # `storage.rollouts.content_digest` of the first step
    own_verdict: str | None  # of the run's own report; None where it has none

    @property
    def seed(self) -> int:
        return self.config.seed

    @property
    def warm_rows(self) -> Sequence[MetricRow]:
        """Without the first steps, which fill caches."""
        return self.rows[min(WARM_UP_STEPS, len(self.rows) - 1) :]

    def series(self, metric: str) -> np.ndarray:
        """[steps] float64 of a metric; NaN where nothing was observed."""
        return np.array([number(row.get(metric)) for row in self.rows], dtype=np.float64)

    def total(self, metric: str) -> int:
        """Sum of a count over the steps that have one."""
        return round(float(np.nansum(self.series(metric))))

    def num_rollouts(self) -> np.ndarray:
        """[steps] rollouts drawn: the groups of a step have `rollout.group_size` members each."""
        groups = np.sum([self.series(f"group/{status}") for status in GroupStatus], axis=0)
        return np.nan_to_num(groups) * self.config.rollout.group_size


def number(value: float | None) -> float:
    """A value of a metrics row; NaN where nothing was observed."""
    return math.nan if value is None else float(value)


def is_free(key: str) -> bool:
    """Whether two set-ups may differ in a setting and still be expected to learn the same."""
    return key in FREE or key.partition(".")[0] in FREE


def differing(a: FinishedRun, b: FinishedRun) -> list[str]:
    """Settings of two runs that are not equal."""
    values_a, values_b = flat(a.config), flat(b.config)
    return [key for key, value in values_a.items() if value != values_b[key]]


def check_side(side: str, runs: Sequence[FinishedRun]) -> None:
    """One set-up, one run per seed, all finished.

    Raises:
        DataError: otherwise.
    """
    if not runs:
        raise DataError(f"side {side} has no run")
    seeds = [run.seed for run in runs]
    repeated = sorted({seed for seed in seeds if seeds.count(seed) > 1})
    if repeated:
        raise DataError(
            f"side {side} has several runs of seed {repeated[0]}: a seed counts once, or the spread over seeds looks "
            "smaller than it is; give one run per seed"
        )
    for run in runs:
        apart = [key for key in differing(runs[0], run) if key == "trainer.backend" or not is_free(key)]
        if apart:
            raise DataError(
                f"side {side} mixes two set-ups: {runs[0].name} and {run.name} differ in {listed(apart)}; a side is "
                "one set-up with one run per seed"
            )
        if len(run.rows) < run.config.loop.steps:
            raise DataError(
                f"run {run.name} did {len(run.rows)} of {run.config.loop.steps} steps; only finished runs are compared"
            )
