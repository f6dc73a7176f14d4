"""Where and why two paths part: causes, findings, and the diagnosis that a failing report carries.

A cause is named only when making the same mistake on purpose reproduces the suspect: a model that shares no code with
trainer or engine scores the same rows with the documents joined, at another temperature, with another version's
weights, and the one result that equals the suspect's to rounding is the cause. When several or none do, the diagnosis
says so. The parts are in `bisect_scores` (log-probabilities), `bisect_layers` (hidden states), `bisect_training`
(gradients and updates), `bisect_advantages` and `bisect_records` (certificates and stored rollouts).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

import torch

from grpo_lib.algo.faults import Fault
from grpo_lib.interfaces import PolicyLoss
from grpo_lib.types import PackedBatch, ParityReport

DIAGNOSIS = "diagnosis"  # name of the table of findings


class Cause(StrEnum):
    """What went wrong, as a user would say it."""

    BOUNDARIES_DROPPED = "document boundaries dropped"
    POSITIONS_RUN_ON = "position ids do not restart at each document"
    LABELS_SHIFTED = "labels shifted"
    TEMPERATURE = "temperature not applied"
    STALE_WEIGHTS = "weights of another version"
    STALE_TENSORS = "some tensors are of another version"
    ROUNDED_WEIGHTS = "weights rounded to bfloat16"
    FOREIGN_ROLLOUTS = "rollouts that these weights did not sample"
    TENSORS_NOT_SENT = "tensors not sent to the engine"
    TENSORS_DAMAGED = "tensors changed on the way to the engine"
    ENGINE_BEHIND = "engine at another version than the trainer"
    DECODE_DIFFERS = "the engine decodes with other weights than it received"
    HEAD_UNTIED = "output head untied from the embedding"
    LOSS_DENOMINATOR = "loss denominator is not the step's"
    ADVANTAGES_SWAPPED = "advantages swapped between groups"
    ADVANTAGES_CHANGED = "advantages changed"
    LEARNING_RATE = "learning rate is not the configured one"
    STEP_SKIPPED = "optimiser step skipped"
    ROUNDED_MASTERS = "master weights kept in bfloat16"
    UNEXPLAINED = "unexplained"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause, where it shows, and why nothing else is blamed."""

    cause: Cause
    subject: str  # the scorer, trainer or record that is wrong
    where: str  # document and position, tensor, layer, version, step or sample ids
    evidence: str
    unexplained: float = math.nan  # share of the difference that the cause leaves over; NaN where none was fitted

    def text(self) -> str:
        """One line for a terminal or an error."""
        return f"{self.subject}: {self.cause}; {self.where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All findings, the best founded first, and the tables behind them."""

    findings: tuple[Finding, ...] = ()
    tables: Mapping[str, Sequence[Mapping[str, object]]] = field(default_factory=dict)

    @property
    def causes(self) -> frozenset[Cause]:
        return frozenset(finding.cause for finding in self.findings)

    @staticmethod
    def merged(parts: Sequence[Diagnosis]) -> Diagnosis:
        """Findings and tables of several parts; what is unexplained stays only for subjects that nothing explains."""
        findings = [finding for part in parts for finding in part.findings]
        explained = {finding.subject for finding in findings if finding.cause is not Cause.UNEXPLAINED}
        kept = [f for f in findings if f.cause is not Cause.UNEXPLAINED or f.subject not in explained]
        tables: dict[str, list[Mapping[str, object]]] = {}
        for part in parts:
            for name, rows in part.tables.items():
                tables.setdefault(name, []).extend(rows)
        return Diagnosis(findings=tuple(dict.fromkeys(kept)), tables=tables)


class Reference(Protocol):
    """A model independent of trainers and engines, which can make a mistake on purpose."""

    @property
    def temperature(self) -> float: ...

    @property
    def version(self) -> int:
        """Policy version that the suspects should hold."""
        ...

    @property
    def versions(self) -> tuple[int, ...]:
        """All versions whose weights it can take."""
        ...

    @property
    def tensor_names(self) -> tuple[str, ...]: ...

    @property
    def tied_embedding(self) -> str | None:
        """Name of the embedding that is the output head too; None where the head is a tensor of its own."""
        ...

    def logprobs(self, batch: PackedBatch, fault: Fault) -> torch.Tensor:
        """[B, T] of the labels of `faulty_batch(batch, fault)`."""
        ...

    def hidden_states(self, batch: PackedBatch) -> Mapping[str, torch.Tensor]:
        """``"embedding"``, ``"layer 0"`` … → [B, T, D], 0 at padding: the residual stream after each block."""
        ...

    def gradient(
        self, batches: Sequence[PackedBatch], loss: PolicyLoss, *, loss_denominator: float, fault: Fault
    ) -> Mapping[str, torch.Tensor]:
        """Tensor name → gradient of the summed token loss / `loss_denominator`, not clipped."""
        ...


def with_diagnosis(report: ParityReport, diagnosis: Diagnosis) -> ParityReport:
    """The report with the findings as a table, and the tables behind them."""
    rows = [
        {
            "cause": str(finding.cause),
            "subject": finding.subject,
            "where": finding.where,
            "evidence": finding.evidence,
            "unexplained": finding.unexplained,
        }
        for finding in diagnosis.findings
    ]
    return replace(report, tables={**report.tables, **diagnosis.tables, DIAGNOSIS: rows})


def is_root_level(tensor_name: str) -> bool:
    """Whether a tensor belongs to no block: embeddings, final norm, output head."""
    return ".layers." not in tensor_name


def listed(names: Sequence[object], most: int = 6) -> str:
    """``"a, b and 3 more"``; ``"none"`` for no names."""
    shown = ", ".join(str(name) for name in names[:most]) or "none"
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
