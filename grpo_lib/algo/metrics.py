"""Metrics of a step's rollouts, each with the reduction under which it may be merged."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from grpo_lib.algo.advantages import GroupAssessment
from grpo_lib.types import (
    FinishReason,
    GroupStatus,
    Rollout,
    RolloutGroup,
    Stat,
    StepMetrics,
    VerdictReason,
    VerdictState,
)


def rollout_metrics(
    groups: Sequence[RolloutGroup], assessments: Sequence[GroupAssessment], *, policy_version: int
) -> StepMetrics:
    """Rewards, groups, advantages, responses, staleness and sampling health of all groups of a step.

    Rewards are of usable members: a failed verifier's reward is no reward. `reward/correct_rate` is over all groups,
    `reward/correct_rate_kept` over those with spread, which is near one half whatever the policy can do.

    Args:
        policy_version: Version that is about to be trained on these groups.
    """
    pairs = list(zip(groups, assessments, strict=True))
    usable = [(r, a.status) for g, a in pairs for r, ok in zip(g.rollouts, a.usable, strict=True) if ok]
    kept = [rollout for rollout, status in usable if status is GroupStatus.KEPT]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    stats = {
        "reward/mean": _mean([rollout.verdict.reward for rollout, _ in usable]),
        "reward/correct_rate": _mean([_correct(rollout) for rollout, _ in usable]),
        "reward/correct_rate_kept": _mean([_correct(rollout) for rollout in kept]),
        "verdict/failed_share": _mean([rollout.verdict.state is VerdictState.FAILED for rollout in rollouts]),
    }
    for status in GroupStatus:
        stats[f"group/{status}"] = Stat.sum(sum(a.status is status for a in assessments))
    stats |= _advantage_stats(assessments) | _response_stats(rollouts) | _staleness_stats(rollouts, policy_version)
    return StepMetrics(stats=stats | _sampling_stats(groups, rollouts))


def _advantage_stats(assessments: Sequence[GroupAssessment]) -> dict[str, Stat]:
    """Over usable members of kept groups, one value per sequence."""
    kept = [a.advantages[a.usable] for a in assessments if a.status is GroupStatus.KEPT]
    if not kept:
        return {}
    values = np.concatenate(kept)
    return {
        "advantage/min": Stat.min(values.min()),
        "advantage/mean": _mean(values),
        "advantage/max": Stat.max(values.max()),
    }


def _response_stats(rollouts: Sequence[Rollout]) -> dict[str, Stat]:
    """Lengths leave out aborted fragments, which say how long we waited, not how long the policy writes."""
    reasons = [rollout.completion.finish_reason for rollout in rollouts]
    complete = [r.completion for r in rollouts if r.completion.finish_reason is not FinishReason.ABORT]
    lengths = np.array([len(completion.token_ids) for completion in complete], dtype=np.float64)
    stats = {
        "response/len_mean": _mean(lengths),
        "response/len_p95": Stat.of_quantile(lengths, 0.95),
        "response/stop_rate": _mean([reason is FinishReason.STOP for reason in reasons]),
        "response/truncated": _mean([reason is FinishReason.LENGTH for reason in reasons]),
        "response/aborted": _mean([reason is FinishReason.ABORT for reason in reasons]),
    }
    return stats | ({"response/len_max": Stat.max(lengths.max())} if lengths.size else {})


def _staleness_stats(rollouts: Sequence[Rollout], policy_version: int) -> dict[str, Stat]:
    """Age in policy versions, of tokens: one completion may span several versions."""
    spans = [span for rollout in rollouts for span in rollout.completion.version_spans]
    if not spans:
        return {}
    ages = np.array([policy_version - span.version for span in spans], dtype=np.float64)
    tokens = np.array([span.stop - span.start for span in spans], dtype=np.float64)
    return {
        "staleness/mean": Stat.mean((ages * tokens).sum(), tokens.sum()),
        "staleness/max": Stat.max(ages.max()),
    }


def _sampling_stats(groups: Sequence[RolloutGroup], rollouts: Sequence[Rollout]) -> dict[str, Stat]:
    """Members of a group drawn from one seed are copies that look like agreement (UniRL 208)."""
    unique = [
        len({rollout.completion.token_ids.tobytes() for rollout in group.rollouts}) / len(group.rollouts)
        for group in groups
        if group.rollouts
    ]
    seeds = [rollout.completion.seed for rollout in rollouts]
    return {
        "group/unique_completions": _mean(unique),
        "sampling/seed_collisions": Stat.sum(len(seeds) - len(set(seeds))),
    }


def _correct(rollout: Rollout) -> bool:
    return rollout.verdict.reason is VerdictReason.CORRECT


def _mean(values: Sequence[float] | np.ndarray) -> Stat:
    return Stat.mean(float(np.sum(values)), len(values))
