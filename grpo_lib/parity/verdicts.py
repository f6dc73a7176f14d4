"""Every rule of a run's parity report: what is checked, against which tolerance, on how much evidence.

| check | value | tolerance | evidence it needs |
|---|---|---|---|
| a vs b: mean, p99.9, max | abs. logprob difference, nats | `parity.{mean,p999,max}_abs` | `parity.min_tokens` tokens |
| decode vs score | largest, engine with itself | `parity.decode_score_max_abs` | `parity.min_tokens` tokens |
| tis_clipfrac, probe and training | tokens with ratio above the cap | 0 | `parity.min_tokens` tokens |
| non-finite log-probabilities | tokens | 0 | 1 token |
| sharded checkpoint | tensors that differ from the source | 0 | 1 tensor |
| weight sync | certificates that are not ok, versions without one | 0 | 1 push with a decode canary |
| one optimiser step per step | steps that broke it, or moved no weight | 0 | 1 applied step |
| learning rate is the configured one | steps off the schedule | 0 | 1 applied step |
| time adds up | share of the step that no span claims | 0.02 | 1 step |
| finite metrics | values of applied steps that are not numbers | 0 | 1 applied step |
| evaluation above zero | 1 where sampled pass@1 is exactly 0 | 0 | 1 judged sample |

A violation FAILs however little was seen; without a violation, too little evidence is INCONCLUSIVE and never PASS; a
NaN is a violation.

The rules of a replay stand in `replay_verdicts`, those for two sets of finished runs in `run_verdicts`, each under a
table like this one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_lib.config import ParityConfig, TrainerConfig
from grpo_lib.parity.probe import ENGINE_DECODE, ENGINE_SCORE, PairStatistics, poisson_interval
from grpo_lib.timing import SPANS
from grpo_lib.types import ParityCheck, ParityVerdict, ShardPlan, SyncCertificate

UNCLAIMED_TIME = 0.02
_RATE_TOLERANCE = 1e-9

MetricRow = Mapping[str, Any]  # one step of the metrics file; None where nothing was observed


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRule:
    """One tolerance that every pair of scorers must keep."""

    label: str
    statistic: Callable[[PairStatistics], float]
    tolerance: Callable[[ParityConfig], float]


PAIR_RULES = (
    PairRule(label="mean", statistic=lambda pair: pair.mean_abs, tolerance=lambda config: config.mean_abs),
    PairRule(label="p99.9", statistic=lambda pair: pair.p999_abs, tolerance=lambda config: config.p999_abs),
    PairRule(label="max", statistic=lambda pair: pair.max_abs, tolerance=lambda config: config.max_abs),
)


def decide(value: float, tolerance: float, *, num_observations: int, needed: int) -> ParityVerdict:
    """PASS needs both a value within its tolerance and enough evidence."""
    if value > tolerance or (math.isnan(value) and num_observations > 0):
        return ParityVerdict.FAIL
    return ParityVerdict.PASS if num_observations >= needed else ParityVerdict.INCONCLUSIVE


def check(
    name: str, value: float, tolerance: float, *, num_observations: int, needed: int, evidence: str
) -> ParityCheck:
    """One decided check; too little evidence is said first."""
    verdict = decide(value, tolerance, num_observations=num_observations, needed=needed)
    if verdict is ParityVerdict.INCONCLUSIVE:
        evidence = f"{num_observations:,} observations, {needed:,} needed. {evidence}".strip()
    return ParityCheck(
        name=name,
        verdict=verdict,
        value=value,
        tolerance=tolerance,
        num_observations=num_observations,
        evidence=evidence,
    )


def pair_checks(pairs: Sequence[PairStatistics], config: ParityConfig) -> list[ParityCheck]:
    """Distances of every pair, and the engine against itself."""
    checks = [
        check(
            f"{pair.name_a} vs {pair.name_b}: {rule.label} |dlogprob|",
            math.nan if pair.nan_count else rule.statistic(pair),
            rule.tolerance(config),
            num_observations=pair.num_tokens,
            needed=config.min_tokens,
            evidence=f"{pair.nan_count:,} non-finite" if pair.nan_count else f"largest at {pair.worst}",
        )
        for pair in pairs
        # The engine's score is bound to its decode by the check below; a second set of rows would say the same.
        if ENGINE_SCORE not in (pair.name_a, pair.name_b)
        for rule in PAIR_RULES
    ]
    own = next((pair for pair in pairs if _is_self(pair)), None)
    checks.append(
        check(
            f"{ENGINE_DECODE} vs {ENGINE_SCORE}: max |dlogprob|",
            math.nan if own is None or own.nan_count else own.max_abs,
            config.decode_score_max_abs,
            num_observations=own.num_tokens if own else 0,
            needed=config.min_tokens,
            evidence=f"largest at {own.worst}" if own else "The engine did not score its own tokens.",
        )
    )
    return checks


def _is_self(pair: PairStatistics) -> bool:
    return {pair.name_a, pair.name_b} == {ENGINE_DECODE, ENGINE_SCORE}


def nan_check(pairs: Sequence[PairStatistics]) -> ParityCheck:
    """No scorer may give a NaN or infinite log-probability to a token that was sampled."""
    count = sum(pair.nan_count for pair in pairs)
    tokens = sum(pair.num_tokens for pair in pairs)
    return check(
        "non-finite log-probabilities",
        count,
        0.0,
        num_observations=tokens,
        needed=1,
        evidence=", ".join(f"{p.name_a} vs {p.name_b}: {p.nan_count:,}" for p in pairs if p.nan_count)
        or f"none in {tokens:,} comparisons",
    )


def clip_checks(
    pairs: Sequence[PairStatistics], rows: Sequence[MetricRow] | None, config: ParityConfig
) -> list[ParityCheck]:
    """Clipped importance weights: trainers against the stored tokens, and the steps of the run itself.

    Args:
        rows: None leaves the run's steps out.
    """
    checks = [
        _clip_check(f"tis_clipfrac, {pair.name_a} on stored tokens", pair.tis_clip_count, pair.num_tokens, config)
        for pair in pairs
        if pair.name_b == ENGINE_DECODE and not _is_self(pair)
    ]
    if rows is None:
        return checks
    applied = _applied(rows)
    count = sum(int(row.get("mismatch/tis_clip_count") or 0) for row in applied)
    tokens = sum(int(row.get("batch/trained_tokens") or 0) for row in applied)
    return [*checks, _clip_check("tis_clipfrac, training steps", count, tokens, config)]


def _clip_check(name: str, count: int, tokens: int, config: ParityConfig) -> ParityCheck:
    low, high = poisson_interval(count, tokens)
    return check(
        name,
        count,
        0.0,
        num_observations=tokens,
        needed=config.min_tokens,
        evidence=f"{count:,} of {tokens:,} tokens; rate in [{low:.2g}, {high:.2g}] (exact Poisson, 95 %)",
    )


def shard_check(plan: ShardPlan) -> ParityCheck:
    """The sharded checkpoint, gathered again, has the source's bits."""
    return check(
        "sharded checkpoint",
        len(plan.mismatched),
        0.0,
        num_observations=len(plan.tensors),
        needed=1,
        evidence=f"{len(plan.tensors)} tensors on {plan.num_ranks} ranks; differing: {listed(plan.mismatched)}",
    )


def sync_check(certificates: Sequence[SyncCertificate], rows: Sequence[MetricRow]) -> ParityCheck:
    """Every push certified, every policy version of the run pushed, and at least one decode canary, which alone proves
    decoding."""
    bad = [f"v{c.policy_version}" for c in certificates if not c.ok]
    reached = {row["policy_version"] for row in rows} | {
        row["policy_version"] - bool(row.get("optim/applied")) for row in rows[:1]
    }
    skipped = sorted(reached - {certificate.policy_version for certificate in certificates})
    canaries = [certificate.canary for certificate in certificates if certificate.canary is not None]
    return check(
        "weight sync",
        len(bad) + len(skipped),
        0.0,
        num_observations=len(certificates) if canaries else 0,
        needed=1,
        evidence=(
            f"{len(certificates)} pushes, {len(canaries)} decode canaries (largest difference "
            f"{max((canary.max_abs for canary in canaries), default=math.nan):.2g}); not ok: {listed(bad)}; "
            f"versions without a push: {listed([f'v{version}' for version in skipped])}"
        ),
    )


def learning_check(rows: Sequence[MetricRow]) -> ParityCheck:
    """Each applied step moved weights and the version by exactly one; each other step left the version alone."""
    broken = []
    version = None
    for row in rows:
        applied = bool(row.get("optim/applied"))
        moved = applied and (row.get("optim/weights_moved") or 0) > 0
        if applied and not moved:
            broken.append(f"step {row['step']} moved no weight")
        if version is not None and row["policy_version"] != version + applied:
            broken.append(f"step {row['step']} went from version {version} to {row['policy_version']}")
        version = row["policy_version"]
    applied_steps = len(_applied(rows))
    return check(
        "one optimiser step per step",
        len(broken),
        0.0,
        num_observations=applied_steps,
        needed=1,
        evidence=listed(broken) if broken else f"{applied_steps:,} of {len(rows):,} steps applied, all moved weights",
    )


def schedule_check(rows: Sequence[MetricRow], config: TrainerConfig) -> ParityCheck:
    """Warm-up rises to the peak; then `constant` stays there exactly, and a decay never rises again.

    Written against the meaning of the names and not against the trainer's formula: a trainer that did not know
    `constant` once decayed to zero instead.
    """
    broken = []
    previous = 0.0
    for row in _applied(rows):
        rate, done = row.get("optim/lr") or 0.0, row["policy_version"] - 1
        if done < config.warmup_steps:
            fits = previous < rate <= config.learning_rate * (1 + _RATE_TOLERANCE)
        elif config.lr_scheduler == "constant":
            fits = math.isclose(rate, config.learning_rate, rel_tol=_RATE_TOLERANCE)
        else:
            ceiling = config.learning_rate if done <= config.warmup_steps else previous
            fits = 0 < rate <= ceiling * (1 + _RATE_TOLERANCE)
        if not fits:
            broken.append(f"{rate:.4g} in step {row['step']}")
        previous = rate
    return check(
        "learning rate is the configured one",
        len(broken),
        0.0,
        num_observations=len(_applied(rows)),
        needed=1,
        evidence=f"{config.lr_scheduler} at {config.learning_rate:g}, {config.warmup_steps} warm-up steps; "
        f"off: {listed(broken)}",
    )


def time_check(rows: Sequence[MetricRow]) -> ParityCheck:
    """The spans account for the run's steps."""
    step_s = sum(row["time/step_s"] for row in rows)
    claimed_s = sum(row[f"time/{span}_s"] for row in rows for span in SPANS)
    worst = max(rows, key=lambda row: row["time/other_s"], default=None)
    return check(
        "time adds up",
        abs(step_s - claimed_s) / step_s if step_s else math.nan,
        UNCLAIMED_TIME,
        num_observations=len(rows),
        needed=1,
        evidence=f"{claimed_s:.2f} of {step_s:.2f} s claimed"
        + (f"; most unclaimed in step {worst['step']}: {worst['time/other_s']:.3f} s" if worst else ""),
    )


def finite_check(rows: Sequence[MetricRow]) -> ParityCheck:
    """Steps without trainable tokens have nothing to observe in places; applied ones have a number everywhere."""
    applied = _applied(rows)
    bad = [
        f"{name} in step {row['step']}"
        for row in applied
        for name, value in row.items()
        if value is None or (isinstance(value, float) and not math.isfinite(value))
    ]
    return check(
        "finite metrics",
        len(bad),
        0.0,
        num_observations=len(applied),
        needed=1,
        evidence=listed(bad) if bad else f"{sum(len(row) for row in applied):,} values of {len(applied):,} steps",
    )


def evaluation_check(evaluation: Mapping[str, Any]) -> ParityCheck:
    """A trained policy that is never right: far more often a broken verifier, template or stop token."""
    after = evaluation["after"]
    accuracy = after["sampled_pass_at_1"]["value"]
    judged = after["num_samples"] - after["failed_verdicts"]
    before = evaluation["before"]["sampled_pass_at_1"]["value"]
    return check(
        "evaluation above zero",
        math.nan if accuracy is None else float(accuracy == 0),
        0.0,
        num_observations=max(0, judged),
        needed=1,
        evidence=f"sampled pass@1 {_number(before)} before, {_number(accuracy)} after",
    )


def _applied(rows: Sequence[MetricRow]) -> list[MetricRow]:
    return [row for row in rows if row.get("optim/applied")]


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def listed(names: Sequence[str], most: int = 4) -> str:
    shown = ", ".join(names[:most]) or "none"
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
