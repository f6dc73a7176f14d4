"""From the rewards of one group to one advantage per member.

Sources: GRPO, arXiv 2402.03300 (`standard`); Dr. GRPO, arXiv 2503.20783 (`centered`); RLOO, arXiv 2402.14740
(`leave_one_out`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np

from grpo_lib.types import FinishReason, GroupStatus, Rollout, RolloutGroup, VerdictState

AdvantageKind = Literal["centered", "standard", "leave_one_out"]

_STD_EPSILON = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupAssessment:
    """What a group teaches: its status and one advantage per member.

    Rewards 1, 0, failed, 1 with `centered`: status KEPT, usable T T F T, advantages 1/3, -2/3, 0, 1/3.
    """

    status: GroupStatus
    advantages: np.ndarray  # [n] float64, 0 where not usable or the group is not KEPT
    usable: np.ndarray  # [n] bool: judged and complete, so part of the statistics


def group_advantages(rewards_n: np.ndarray, kind: AdvantageKind) -> np.ndarray:
    """[n] float64 advantages of one group's rewards [n].

    Raises:
        ValueError: fewer than two rewards, or one that is not finite.
    """
    rewards_n = np.asarray(rewards_n, dtype=np.float64)
    if rewards_n.ndim != 1 or len(rewards_n) < 2:
        raise ValueError(f"group advantages compare at least two rewards, got shape {rewards_n.shape}")
    if not np.isfinite(rewards_n).all():
        raise ValueError(f"rewards {rewards_n.tolist()} are not all finite")
    return _BASELINES[kind](rewards_n)


def assess_group(group: RolloutGroup, *, kind: AdvantageKind, correct_reward: float) -> GroupAssessment:
    """Judge a whole group, before anything is masked out of the loss.

    A member whose verifier failed or whose completion was aborted has no reward to compare, so it enters neither the
    statistics nor the loss. A truncated member has one and does: masking it first would shift the baseline of the
    others (open-instruct 1794). A group without spread is LOW or HIGH by the middle of [0, correct_reward].
    """
    usable = np.array([is_usable(rollout) for rollout in group.rollouts], dtype=bool)
    advantages = np.zeros(len(usable), dtype=np.float64)
    rewards = np.array([rollout.verdict.reward for rollout in group.rollouts], dtype=np.float64)[usable]
    status = _status(rewards, correct_reward)
    if status is GroupStatus.KEPT:
        advantages[usable] = group_advantages(rewards, kind)
    return GroupAssessment(status=status, advantages=advantages, usable=usable)


def is_usable(rollout: Rollout) -> bool:
    """Whether a member has a reward that says something about its tokens."""
    return (
        rollout.verdict.state is not VerdictState.FAILED and rollout.completion.finish_reason is not FinishReason.ABORT
    )


def _status(rewards: np.ndarray, correct_reward: float) -> GroupStatus:
    if len(rewards) < 2:
        return GroupStatus.EXCLUDED
    if (rewards != rewards[0]).any():
        return GroupStatus.KEPT
    return GroupStatus.ZERO_SPREAD_HIGH if rewards[0] > correct_reward / 2 else GroupStatus.ZERO_SPREAD_LOW


def _centered(rewards_n: np.ndarray) -> np.ndarray:
    return rewards_n - rewards_n.mean()


def _standard(rewards_n: np.ndarray) -> np.ndarray:
    return _centered(rewards_n) / (rewards_n.std() + _STD_EPSILON)


def _leave_one_out(rewards_n: np.ndarray) -> np.ndarray:
    """r - mean of the others, which is the centered advantage times n / (n - 1)."""
    return _centered(rewards_n) * len(rewards_n) / (len(rewards_n) - 1)


_BASELINES: Mapping[AdvantageKind, Callable[[np.ndarray], np.ndarray]] = MappingProxyType(
    {"centered": _centered, "standard": _standard, "leave_one_out": _leave_one_out}
)
