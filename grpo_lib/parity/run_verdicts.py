"""Every rule for two sets of finished runs, A and B: what is checked, against which tolerance, on how much evidence.

| check | value | tolerance | evidence it needs |
|---|---|---|---|
| same settings | settings that differ, are not named, and decide what is learned | 0 | 1 setting |
| same base model, same prompts | further hashes beside the first | 0 | the hash of every run |
| same samples in the first step | common seeds with other samples | 0 | 1 common seed, one machine and engine |
| a run is on one side only | 0 | 0 | every run on one side only |
| each run's own report | reports that FAIL | 0 | a PASS of every run |
| held-out accuracy, reward, correct rate | largest difference left | `parity.accuracy_margin` | `parity.min_seeds` |
| held-out accuracy over prompts | the same, never FAILs | `parity.accuracy_margin` | `parity.min_seeds` |
| equal rates: clipped, failed, truncated | 1 - p | 1 - 0.01 / 3 | `parity.min_seeds`, `parity.min_tokens` |
| time spans have the same boundaries | steps that do not add up | 0 | equal spans on both sides |

A side is one set-up with one run per seed. Numbers of runs scatter with the seed, so a violation must be shown: an
equivalence FAILs when the whole 90 % interval of the difference lies outside of the margin, and PASSes when all of it
lies inside and there are enough seeds. Rates FAIL when the exact test and the test over seeds both reject. How long a
step took decides nothing. The other rules are those of `verdicts`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from grpo_lib.parity.statistics import POWER, CountComparison, Equivalence
from grpo_lib.parity.verdicts import check, listed
from grpo_lib.types import ParityCheck, ParityVerdict

COUNT_ALPHA = 0.01  # over all counts of a report together


def decide_equivalence(low: float, high: float, margin: float, *, num_observations: int, needed: int) -> ParityVerdict:
    """PASS needs the whole interval inside the margin, FAIL the whole interval on one side outside of it."""
    if low > margin or high < -margin or math.isnan(low) or math.isnan(high):
        return ParityVerdict.FAIL
    inside = -margin <= low and high <= margin
    return ParityVerdict.PASS if inside and num_observations >= needed else ParityVerdict.INCONCLUSIVE


def equivalence_check(
    name: str, found: Equivalence, *, seeds: tuple[int, int], needed: int, detail: str
) -> ParityCheck:
    """Means over seeds. The value is the largest difference that the interval leaves possible."""
    fewest = min(seeds)
    verdict = decide_equivalence(found.low, found.high, found.margin, num_observations=fewest, needed=needed)
    parts = [f"{fewest} seeds a side, {needed} needed."] if fewest < needed else []
    if math.isfinite(found.low):
        parts.append(
            f"B - A = {found.difference:+.4f}, 90 % interval [{found.low:+.4f}, {found.high:+.4f}] (two one-sided "
            f"tests, Welch, p = {found.p_value:.2g}). With these spreads and seeds, two equal set-ups pass with "
            f"probability {found.power:.2f}; a margin of {found.detectable_margin:.3g} would give them {POWER}."
        )
    else:
        parts.append(f"B - A = {found.difference:+.4f}; the spread over seeds is unknown.")
    return ParityCheck(
        name=name,
        verdict=verdict,
        value=max(abs(found.low), abs(found.high)),
        tolerance=found.margin,
        num_observations=fewest,
        evidence=" ".join([*parts, detail]),
    )


def prompts_check(
    difference: float,
    low: float,
    high: float,
    *,
    margin: float,
    confidence: float,
    num_prompts: int,
    paired: bool,
    seeds: tuple[int, int],
    needed: int,
) -> ParityCheck:
    """Held-out accuracy over prompts. It never fails: prompts do not show how far two seeds of one set-up are apart."""
    inside = num_prompts > 1 and -margin <= low and high <= margin
    enough = min(seeds) >= needed
    verdict = ParityVerdict.PASS if inside and enough else ParityVerdict.INCONCLUSIVE
    short = "" if enough else f"{min(seeds)} seeds a side, {needed} needed. "
    return ParityCheck(
        name="held-out accuracy over prompts",
        verdict=verdict,
        value=max(abs(low), abs(high)),
        tolerance=margin,
        num_observations=num_prompts,
        evidence=(
            f"{short}B - A = {difference:+.4f}, {confidence:.0%} interval [{low:+.4f}, {high:+.4f}] (bootstrap "
            f"clustered by prompt, {'the same prompts paired' if paired else 'other prompts on each side'}). It is "
            "about these trained models, not about the set-ups: whether they differ is decided over seeds."
        ),
    )


def count_check(
    name: str,
    found: CountComparison,
    *,
    rates_p: float,
    num_counts: int,
    seeds: tuple[int, int],
    needed_seeds: int,
    needed: int,
) -> ParityCheck:
    """Equal rates of an event. Both tests must reject: the exact one takes events for independent, which those of one
    run are not, and the one over seeds sees only the rates.

    Args:
        rates_p: Of Welch's test of the rates per seed; NaN with fewer than two seeds on a side.
        num_counts: Counts that are tested in the report, which share `COUNT_ALPHA`.
        needed: Exposure on each side.
    """
    alpha = COUNT_ALPHA / num_counts
    p_value = 1.0 if math.isnan(rates_p) else max(found.p_value, rates_p)
    exposure = min(found.exposure_a, found.exposure_b)
    few = min(seeds) < needed_seeds
    return check(
        f"equal rates: {name}",
        1 - p_value,
        1 - alpha,
        num_observations=min(seeds) if few else exposure,
        needed=needed_seeds if few else needed,
        evidence=(
            f"A {found.count_a:,} of {found.exposure_a:,}, rate in [{found.low_a:.2g}, {found.high_a:.2g}]; "
            f"B {found.count_b:,} of {found.exposure_b:,}, rate in [{found.low_b:.2g}, {found.high_b:.2g}] (exact "
            f"Poisson, 95 %); B / A in [{found.ratio_low:.2g}, {found.ratio_high:.2g}]; p = {found.p_value:.2g} exact, "
            f"{'unknown' if math.isnan(rates_p) else f'{rates_p:.2g}'} over {min(seeds)} seeds a side"
        ),
    )


def sides_check(shared: Sequence[str], num_runs: int) -> ParityCheck:
    """A run is no evidence that it equals another one when it is the other one.

    Args:
        shared: Runs that are on both sides.
        num_runs: Distinct runs of both sides.
    """
    return check(
        "a run is on one side only",
        0.0,
        0.0,
        num_observations=num_runs - len(shared),
        needed=num_runs,
        evidence=f"on both sides: {listed(shared)}",
    )


def own_reports_check(own: Mapping[str, str | None]) -> ParityCheck:
    """Each run's own report: a run that fails alone cannot be half of a parity.

    Args:
        own: Run → verdict of its report; None where it has none.
    """
    failed = [name for name, verdict in own.items() if verdict == ParityVerdict.FAIL]
    others = [f"{name} ({verdict or 'no report'})" for name, verdict in own.items() if verdict != ParityVerdict.PASS]
    return check(
        "each run's own report",
        len(failed),
        0.0,
        num_observations=len(own) - len(others),
        needed=len(own),
        evidence=f"{len(own)} reports; not passed: {listed(others)}",
    )


def settings_check(unexpected: Sequence[str], expected: Sequence[str], num_settings: int) -> ParityCheck:
    """Settings that decide what is learned are equal, but for those that the user named.

    Args:
        unexpected: "key: a -> b" of those that differ and may not.
        expected: Of those that may.
    """
    return check(
        "same settings",
        len(unexpected),
        0.0,
        num_observations=num_settings,
        needed=1,
        evidence=f"differing: {listed(unexpected)}; differing as allowed: {listed(expected)}"
        + ("; name it with --differs where it is meant to" if unexpected else ""),
    )


def identity_check(name: str, hashes_a: Sequence[str | None], hashes_b: Sequence[str | None]) -> ParityCheck:
    """All runs of both sides started from the same bytes."""
    known = [value for value in (*hashes_a, *hashes_b) if value is not None]
    return check(
        name,
        max(0, len(set(known)) - 1),
        0.0,
        num_observations=len(known),
        needed=len(hashes_a) + len(hashes_b),
        evidence=f"sha256 of A: {_short(hashes_a)}; of B: {_short(hashes_b)}",
    )


def samples_check(differing: Sequence[int], seeds: Sequence[int], *, same_sampler: bool) -> ParityCheck:
    """With one seed and one base model both sides draw the same first step, bit for bit, where the engine is the same.

    Args:
        differing: Seeds whose first steps differ.
        seeds: Seeds that both sides have.
        same_sampler: Machine and engine packages are equal; elsewhere rounding may decide a draw.
    """
    return check(
        "same samples in the first step",
        len(differing) if same_sampler else 0.0,
        0.0,
        num_observations=len(seeds) if same_sampler or not differing else 0,
        needed=1,
        evidence=f"seeds on both sides: {listed([str(seed) for seed in seeds])}; with other samples: "
        f"{listed([str(seed) for seed in differing])}"
        + ("" if same_sampler else "; machine or engine packages differ, so draws may"),
    )


def spans_check(
    only_a: Sequence[str], only_b: Sequence[str], broken: Sequence[str], num_steps: int, *, evidence: str
) -> ParityCheck:
    """Times are compared only where both sides cut the step at the same places. How long it took decides nothing.

    Args:
        only_a: Spans that B does not have.
        broken: Steps whose spans do not add up to the step.
    """
    apart = [*(f"{name} (A only)" for name in only_a), *(f"{name} (B only)" for name in only_b)]
    return check(
        "time spans have the same boundaries",
        len(broken),
        0.0,
        num_observations=0 if apart else num_steps,
        needed=1,
        evidence=f"spans of one side: {listed(apart)}; steps that do not add up: {listed(broken)}; {evidence}",
    )


def _short(hashes: Sequence[str | None]) -> str:
    return listed(list(dict.fromkeys("unknown" if value is None else value[:12] for value in hashes)))
