"""Lockstep probe: several scorers give log-probabilities of the same stored tokens under frozen weights.

What is compared is d = a - b per token, in float64. Where b sampled the tokens, mean(-d) and mean(expm1(d) - d)
estimate KL(b ‖ a); for other pairs they are just two more distances.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from scipy.special import gammaincinv

from grpo_lib.errors import StalenessError
from grpo_lib.types import FinishReason, RolloutGroup

ENGINE_DECODE = "engine decode"  # as sampled, what training used
ENGINE_SCORE = "engine score"  # the engine's prefill over the finished sequence
BAND = (0.9, 1.1)  # of the ratio exp(d)
# Four bins a decade, the same for every report so that two of them can be laid over each other; |d| below the first
# edge, exact zeros included, and from the last edge on have bins of their own.
HISTOGRAM_EDGES = tuple(float(10 ** (exponent / 4)) for exponent in range(-36, 5))


class Scorer(Protocol):
    """Gives log-probabilities of stored responses with the weights it holds."""

    @property
    def name(self) -> str: ...

    def score(self, groups: Sequence[RolloutGroup]) -> Mapping[str, np.ndarray]:
        """Sample id (as `RolloutGroup.sample_id`) → [R] log-probabilities of the response tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLogprobs:
    """The engine's own log-probabilities, as stored with the rollouts when they were sampled."""

    name: str = ENGINE_DECODE

    def score(self, groups: Sequence[RolloutGroup]) -> Mapping[str, np.ndarray]:
        return {
            group.sample_id(rollout.sample_index): rollout.completion.logprobs
            for group in groups
            for rollout in group.rollouts
            if rollout.completion.finish_reason is not FinishReason.ABORT
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PairStatistics:
    """How far two scorers are apart on n tokens. All but `nan_count` and `num_tokens` are over finite differences."""

    name_a: str
    name_b: str
    num_tokens: int
    nan_count: int  # tokens where either value is NaN or infinite
    mean_abs: float  # nats
    p99_abs: float
    p999_abs: float
    max_abs: float
    mean_signed: float
    k1: float  # mean(-d)
    k3: float  # mean(expm1(d) - d)
    below_band: float  # share of tokens with exp(d) < 0.9
    above_band: float  # share with exp(d) > 1.1
    tis_clip_count: int  # tokens with exp(d) > cap
    tis_clip_low: float  # exact Poisson interval of the clip rate per token
    tis_clip_high: float
    histogram: tuple[int, ...]  # of |d| over `HISTOGRAM_EDGES`, one bin more than edges at each end
    worst: str  # where the largest difference is

    def to_dict(self) -> dict[str, Any]:
        """Plain values; the histogram is a table of its own."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "histogram"}


def poisson_interval(count: int, exposure: int, confidence: float = 0.95) -> tuple[float, float]:
    """Exact (Garwood) interval of a rate from `count` events in `exposure` trials; (0, inf) without trials.

    The limits of the mean are chi2(alpha/2, 2k)/2 and chi2(1 - alpha/2, 2k + 2)/2, that is, inverse incomplete gamma
    functions. With 0 of n the upper limit is 3.7 / n at 95 %, not 0.
    """
    if exposure == 0:
        return 0.0, math.inf
    alpha = 1.0 - confidence
    low = float(gammaincinv(count, alpha / 2)) if count else 0.0
    return low / exposure, float(gammaincinv(count + 1, 1 - alpha / 2)) / exposure


def compare(
    name_a: str,
    logprobs_a: Mapping[str, np.ndarray],
    name_b: str,
    logprobs_b: Mapping[str, np.ndarray],
    *,
    cap: float,
) -> PairStatistics:
    """Statistics of two scorers over the same samples.

    Args:
        logprobs_a: Sample id → [R].
        logprobs_b: The same ids and lengths; the sampler's where it is one of the two.
        cap: Ratio above which the TIS weight is clipped.

    Raises:
        ValueError: the two did not score the same tokens.
    """
    ids = _common_ids(name_a, logprobs_a, name_b, logprobs_b)
    a = np.concatenate([np.zeros(0), *(np.asarray(logprobs_a[key], np.float64) for key in ids)])
    b = np.concatenate([np.zeros(0), *(np.asarray(logprobs_b[key], np.float64) for key in ids)])
    finite = np.isfinite(a) & np.isfinite(b)
    d = a[finite] - b[finite]
    size = np.abs(d)
    empty = len(d) == 0
    clipped = int((d > math.log(cap)).sum())
    low, high = poisson_interval(clipped, len(d))

    def mean(values: np.ndarray) -> float:
        return math.nan if empty else float(values.mean())

    return PairStatistics(
        name_a=name_a,
        name_b=name_b,
        num_tokens=len(a),
        nan_count=len(a) - len(d),
        mean_abs=mean(size),
        p99_abs=math.nan if empty else float(np.quantile(size, 0.99)),
        p999_abs=math.nan if empty else float(np.quantile(size, 0.999)),
        max_abs=math.nan if empty else float(size.max()),
        mean_signed=mean(d),
        k1=mean(-d),
        k3=mean(np.expm1(d) - d),
        below_band=mean(d < math.log(BAND[0])),
        above_band=mean(d > math.log(BAND[1])),
        tis_clip_count=clipped,
        tis_clip_low=low,
        tis_clip_high=high,
        histogram=_histogram(size),
        worst="" if empty else _locate(ids, logprobs_a, int(np.flatnonzero(finite)[size.argmax()]), a, b),
    )


def _histogram(size: np.ndarray) -> tuple[int, ...]:
    bins = np.searchsorted(HISTOGRAM_EDGES, size, "right")
    return tuple(np.bincount(bins, minlength=len(HISTOGRAM_EDGES) + 1).tolist())


def _common_ids(
    name_a: str, logprobs_a: Mapping[str, np.ndarray], name_b: str, logprobs_b: Mapping[str, np.ndarray]
) -> list[str]:
    if logprobs_a.keys() != logprobs_b.keys():
        only = sorted(logprobs_a.keys() ^ logprobs_b.keys())
        raise ValueError(
            f"{name_a} scored {len(logprobs_a)} samples and {name_b} {len(logprobs_b)}; {len(only)} are in one only, "
            f"first {only[0]}"
        )
    for key, values in logprobs_a.items():
        if np.shape(values) != np.shape(logprobs_b[key]) or np.ndim(values) != 1:
            raise ValueError(
                f"sample {key}: {name_a} gave log-probabilities of shape {np.shape(values)}, {name_b} "
                f"{np.shape(logprobs_b[key])}"
            )
    return list(logprobs_a)


def _locate(ids: Sequence[str], logprobs: Mapping[str, np.ndarray], index: int, a: np.ndarray, b: np.ndarray) -> str:
    """E.g. ``"eval.v9.addition-heldout-3/7 response token 2: -0.51 and -0.52"``."""
    ends = np.cumsum([len(logprobs[key]) for key in ids])
    row = int(np.searchsorted(ends, index, "right"))
    start = int(ends[row - 1]) if row else 0
    return f"{ids[row]} response token {index - start}: {a[index]:.7g} and {b[index]:.7g}"


def probe(
    groups: Sequence[RolloutGroup], scorers: Sequence[Scorer], *, policy_version: int, cap: float
) -> tuple[PairStatistics, ...]:
    """Every pair of scorers on the same stored rollouts, in which the earlier one plays the sampler.

    Args:
        policy_version: Version whose weights all scorers hold.

    Raises:
        StalenessError: a rollout was sampled by another version, so its stored log-probabilities are of other weights.
    """
    for group in groups:
        for rollout in group.rollouts:
            versions = {span.version for span in rollout.completion.version_spans}
            if versions - {policy_version}:
                raise StalenessError(
                    f"parity probe at policy version {policy_version}: {group.sample_id(rollout.sample_index)} was "
                    f"sampled by {sorted(versions)}; probe rollouts of the version that is scored"
                )
    scored = [(scorer.name, scorer.score(groups)) for scorer in scorers]
    return tuple(
        compare(name_a, a, name_b, b, cap=cap) for (name_b, b), (name_a, a) in itertools.combinations(scored, 2)
    )
