"""Pair statistics against plain loops and closed forms; the probe against scripted scorers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from scipy.stats import poisson

from grpo_lib.errors import StalenessError
from grpo_lib.parity.probe import (
    ENGINE_DECODE,
    HISTOGRAM_EDGES,
    PairStatistics,
    StoredLogprobs,
    compare,
    poisson_interval,
    probe,
)
from grpo_lib.types import (
    Completion,
    FinishReason,
    Prompt,
    Rollout,
    RolloutGroup,
    Verdict,
    VerdictReason,
    VerdictState,
    VersionSpan,
)


def scored(*rows: Sequence[float]) -> dict[str, np.ndarray]:
    return {f"s{i}": np.array(row, dtype=np.float64) for i, row in enumerate(rows)}


def pair(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray], cap: float = 2.0) -> PairStatistics:
    return compare("a", a, "b", b, cap=cap)


def group(number: int, lengths: Sequence[int], *, version: int = 5, abort: int | None = None) -> RolloutGroup:
    prompt = Prompt(prompt_id=f"p{number}", text="x", token_ids=(2,), answer="1", dataset="d", verifier="exact")
    rollouts = tuple(
        Rollout(
            sample_index=index,
            completion=Completion(
                request_id=f"p{number}/{index}",
                token_ids=np.arange(length),
                logprobs=np.full(length, -0.25 * (index + 1), np.float32),
                version_spans=(VersionSpan(version=version, start=0, stop=length),),
                finish_reason=FinishReason.ABORT if index == abort else FinishReason.STOP,
                seed=index,
                latency_s=0.0,
            ),
            text="",
            verdict=Verdict(state=VerdictState.VALID, reward=1.0, reason=VerdictReason.CORRECT),
        )
        for index, length in enumerate(lengths)
    )
    return RolloutGroup(group_id=f"e0.p{number}", prompt=prompt, rollouts=rollouts)


@dataclass
class Shifted:
    """Scores every token a fixed distance from what is stored."""

    name: str
    by: float

    def score(self, groups: Sequence[RolloutGroup]) -> Mapping[str, np.ndarray]:
        return {key: values.astype(np.float64) + self.by for key, values in StoredLogprobs().score(groups).items()}


def test_statistics_match_a_plain_loop() -> None:
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, 9, 50)
    b = scored(*(rng.normal(-2, 1, n) for n in lengths))
    a = {key: values + rng.normal(0, 0.3, len(values)) for key, values in b.items()}
    found = pair(a, b)
    differences = [float(x) - float(y) for key in a for x, y in zip(a[key], b[key], strict=True)]
    n = len(differences)
    assert found.num_tokens == n == lengths.sum()
    assert found.mean_abs == pytest.approx(sum(map(abs, differences)) / n)
    assert found.mean_signed == pytest.approx(sum(differences) / n)
    assert found.max_abs == pytest.approx(max(map(abs, differences)))
    assert found.k1 == pytest.approx(sum(-d for d in differences) / n)
    assert found.k3 == pytest.approx(sum(math.exp(d) - 1 - d for d in differences) / n)
    assert found.below_band == sum(math.exp(d) < 0.9 for d in differences) / n
    assert found.above_band == sum(math.exp(d) > 1.1 for d in differences) / n
    assert found.tis_clip_count == sum(math.exp(d) > 2.0 for d in differences)
    assert found.tis_clip_count > 0
    ordered = sorted(map(abs, differences))
    assert ordered[int(0.98 * n)] <= found.p99_abs <= ordered[-1]
    assert found.p99_abs <= found.p999_abs <= found.max_abs


def test_k1_and_k3_estimate_the_divergence_from_the_sampler() -> None:
    """Tokens drawn from b; both estimators approach KL(b ‖ a), worked in closed form for three tokens."""
    b, a = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    divergence = float((b * np.log(b / a)).sum())
    tokens = np.random.default_rng(0).choice(3, 400_000, p=b)
    found = pair({"s": np.log(a)[tokens]}, {"s": np.log(b)[tokens]})
    assert found.k1 == pytest.approx(divergence, rel=0.05)
    assert found.k3 == pytest.approx(divergence, rel=0.02)


def test_the_clip_count_is_one_sided_and_the_band_is_not() -> None:
    """What `tis_clipfrac` is blind to: ratios far below 1."""
    found = pair(scored([-3.0, -1.0]), scored([-1.0, -1.0]))
    assert found.tis_clip_count == 0
    assert found.below_band == 0.5
    assert found.above_band == 0.0
    assert pair(scored([-1.0]), scored([-1.0 - math.log(2) - 1e-9])).tis_clip_count == 1
    assert pair(scored([-1.0]), scored([-1.0 - math.log(2) + 1e-9])).tis_clip_count == 0
    assert pair(scored([-1.0]), scored([-1.5]), cap=1.2).tis_clip_count == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_counted_and_left_out(bad: float) -> None:
    found = pair(scored([-1.0, bad, -1.5]), scored([-1.0, -1.0, -1.0]))
    assert (found.num_tokens, found.nan_count) == (3, 1)
    assert found.max_abs == 0.5
    assert found.worst == "s0 response token 2: -1.5 and -1"
    assert pair(scored([-1.0]), scored([bad])).nan_count == 1
    assert math.isnan(pair(scored([bad]), scored([-1.0])).max_abs)


def test_the_worst_token_is_located_across_samples() -> None:
    a = scored([-1.0, -1.0], [], [-2.0, -2.5, -2.0], [-1.0])
    b = scored([-1.0, -1.0], [], [-2.0, -2.0, -2.0], [-1.1])
    assert pair(a, b).worst == "s2 response token 1: -2.5 and -2"


def test_histogram_covers_everything_once() -> None:
    rng = np.random.default_rng(1)
    d = np.concatenate([np.zeros(7), 10 ** rng.uniform(-12, 2, 500)])
    found = pair({"s": d}, {"s": np.zeros_like(d)})
    assert sum(found.histogram) == len(d)
    assert len(found.histogram) == len(HISTOGRAM_EDGES) + 1
    below = int((d < HISTOGRAM_EDGES[0]).sum())
    assert found.histogram[0] == below >= 7
    assert found.histogram[-1] == int((d >= HISTOGRAM_EDGES[-1]).sum()) > 0
    index = HISTOGRAM_EDGES.index(pytest.approx(1e-5))
    assert found.histogram[index + 1] == int(((d >= 1e-5) & (d < 10**-4.75)).sum())


@pytest.mark.parametrize(
    ("a", "b", "match"),
    [
        (scored([0.0]), scored([0.0], [0.0]), "a scored 1 samples and b 2.*s1"),
        (scored([0.0, 0.0]), scored([0.0]), r"sample s0.*\(2,\).*\(1,\)"),
        ({"s": np.zeros((1, 2))}, {"s": np.zeros((1, 2))}, "sample s"),
    ],
)
def test_scorers_of_different_tokens_are_not_compared(a: dict, b: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        pair(a, b)


def test_nothing_to_compare() -> None:
    found = pair({}, {})
    assert found.num_tokens == 0
    assert math.isnan(found.mean_abs)
    assert found.tis_clip_high == math.inf


@pytest.mark.parametrize(("count", "exposure"), [(0, 20_553), (1, 1000), (7, 1000), (250, 300)])
def test_poisson_interval_is_exact(count: int, exposure: int) -> None:
    """At the limits, the chance of so many or more (or so few or fewer) events is exactly 2.5 %."""
    low, high = poisson_interval(count, exposure)
    assert poisson.cdf(count, high * exposure) == pytest.approx(0.025, rel=1e-6)
    if count:
        assert poisson.sf(count - 1, low * exposure) == pytest.approx(0.025, rel=1e-6)
    else:
        assert low == 0.0
        assert high == pytest.approx(-math.log(0.025) / exposure)


def test_probe_compares_every_pair_with_the_earlier_one_as_sampler() -> None:
    groups = [group(0, [2, 3]), group(1, [1, 4])]
    found = probe(groups, [StoredLogprobs(), Shifted("up", 1.0), Shifted("down", -0.5)], policy_version=5, cap=2.0)
    assert [(p.name_a, p.name_b) for p in found] == [("up", ENGINE_DECODE), ("down", ENGINE_DECODE), ("down", "up")]
    assert [p.mean_signed for p in found] == [1.0, -0.5, -1.5]
    assert [p.tis_clip_count for p in found] == [10, 0, 0]
    assert {p.num_tokens for p in found} == {10}


def test_fragments_are_not_probed() -> None:
    assert list(StoredLogprobs().score([group(0, [2, 3, 1], abort=1)])) == ["e0.p0/0", "e0.p0/2"]


def test_rollouts_of_other_weights_are_refused() -> None:
    with pytest.raises(StalenessError, match=r"version 5.*e0\.p1/0 was sampled by \[4\]"):
        probe([group(0, [2]), group(1, [2], version=4)], [StoredLogprobs()], policy_version=5, cap=2.0)


def test_plain_values() -> None:
    plain = pair(scored([-1.0]), scored([-1.5])).to_dict()
    assert plain["max_abs"] == 0.5
    assert "histogram" not in plain
