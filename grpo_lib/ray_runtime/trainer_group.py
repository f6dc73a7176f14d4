"""All trainer ranks behind one front: `TrainerGroup` over actors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from grpo_lib.config import DeadlinesConfig
from grpo_lib.errors import RankFailure
from grpo_lib.ray_runtime.actor_group import ActorGroup
from grpo_lib.ray_runtime.parcels import BatchParcel
from grpo_lib.types import SenderReport, StateKind, StepMetrics, StepPlan, WrittenFile

_TRAIN = "deadlines.train_s"
_RANK_SHARE = 0.9  # a rank's own deadline ends first, because its message knows more


class RayTrainerGroup:
    """`TrainerGroup` whose ranks are actors.

    Args:
        group: Hosts one rank each, with a concurrency of 1: calls are collectives and run in the order sent. A rank has
            the methods of `TrainerBackend`, with `forward_backward(micro_batches, *, loss_denominator)` and
            `logprobs(micro_batches, *, reference)`, and `connect_sender(client, *, port, timeout_s)` and
            `push_weights(policy_version)`.
        name: Of the backend, for reports.
        has_reference: Whether the ranks hold a frozen reference policy.
    """

    def __init__(self, group: ActorGroup, *, name: str, deadlines: DeadlinesConfig, has_reference: bool) -> None:
        self.name = name
        self._group, self._deadlines = group, deadlines
        self.num_ranks, self.has_reference = group.size, has_reference
        self._policy_version: int | None = None

    @property
    def processes(self) -> dict[str, int]:
        """Process id by rank, each on its own machine."""
        return self._group.processes

    @property
    def policy_version(self) -> int:
        """The version that all ranks report; asked for once and after every call that changes it."""
        if self._policy_version is None:
            self._policy_version = self._agreed(self._call("policy_version"))
        return self._policy_version

    def forward_backward(self, plan: StepPlan, *, loss_denominator: float) -> StepMetrics:
        parts = self._group.call_each(
            "forward_backward",
            self._parcels(plan),
            loss_denominator=loss_denominator,
            deadline_s=self._deadlines.train_s,
            setting=_TRAIN,
        )
        return StepMetrics.merged(parts)

    def optim_step(self) -> StepMetrics:
        """Rank 0's metrics: they are global already, equal on all ranks, and must not be added up."""
        stepped = self._group.call_and_read(
            "optim_step", "policy_version", deadline_s=self._deadlines.train_s, setting=_TRAIN
        )
        self._policy_version = self._agreed([version for _, version in stepped])
        return stepped[0][0]

    def logprobs(self, plan: StepPlan, *, reference: bool = False) -> tuple[tuple[torch.Tensor, ...], ...]:
        if reference and not self.has_reference:
            raise ValueError("no reference policy is loaded: algorithm.kl_beta is 0")
        ranks = self._group.call_each(
            "logprobs",
            self._parcels(plan),
            reference=reference,
            deadline_s=self._deadlines.train_s,
            setting=_TRAIN,
        )
        return tuple(tuple(rank) for rank in ranks)

    def begin_save(self, path: Path) -> None:
        """See `interfaces.TrainerGroup`."""
        self._call("begin_save", path)

    def written(self, *, wait: bool, deadline_s: float | None = None) -> tuple[WrittenFile, ...] | None:
        """See `interfaces.TrainerGroup`."""
        files = self._group.call("written", wait=wait, deadline_s=deadline_s or self._deadlines.train_s, setting=_TRAIN)
        return None if any(file is None for file in files) else tuple(files)

    def load(self, path: Path) -> None:
        self._policy_version = None
        self._call("load", path)

    def export_hf(self, path: Path) -> None:
        self._call("export_hf", path)

    # -- replay: `interfaces.ReplayTrainer` --------------------------------------------------------------------------

    def dump_state(self, folder: Path, kinds: Sequence[StateKind]) -> None:
        self._call("dump_state", folder, tuple(kinds))

    def restore_state(self, folder: Path) -> None:
        self._policy_version = None
        self._call("restore_state", folder)

    def load_hf_weights(self, path: Path) -> None:
        """Weights of a Hugging Face folder of the same model; moments and policy version stay as they are."""
        self._call("load_hf_weights", path)

    def hidden_states(self, plan: StepPlan) -> tuple[tuple[dict[str, torch.Tensor], ...], ...]:
        ranks = self._group.call_each(
            "hidden_states", self._parcels(plan), deadline_s=self._deadlines.train_s, setting=_TRAIN
        )
        return tuple(tuple(rank) for rank in ranks)

    # -- weights: `weight_sync.sync.SendingRanks` --------------------------------------------------------------------

    def arrive(self, *, deadline_s: float, setting: str) -> None:
        self._group.ping(deadline_s=deadline_s, setting=setting)

    def connect_weights(self, client: object, *, port: int, deadline_s: float, setting: str) -> None:
        self._group.call(
            "connect_sender",
            client,
            port=port,
            timeout_s=_RANK_SHARE * deadline_s,
            deadline_s=deadline_s,
            setting=setting,
        )

    def push_weights(self, policy_version: int, *, deadline_s: float, setting: str) -> SenderReport:
        reports = self._group.call("push_weights", policy_version, deadline_s=deadline_s, setting=setting)
        return reports[0]

    def close(self) -> None:
        self._group.close()

    def _call(self, method: str, *args: Any) -> list[Any]:
        return self._group.call(method, *args, deadline_s=self._deadlines.train_s, setting=_TRAIN)

    def _parcels(self, plan: StepPlan) -> list[tuple[BatchParcel]]:
        if len(plan.micro_batches) != self.num_ranks:
            raise ValueError(f"a plan for {len(plan.micro_batches)} ranks was given to {self.num_ranks}")
        return [(BatchParcel(micro_batches),) for micro_batches in plan.micro_batches]

    def _agreed(self, versions: list[int]) -> int:
        if len(set(versions)) != 1:
            raise RankFailure(f"{self._group.name}s are at different policy versions: {versions}")
        return versions[0]
