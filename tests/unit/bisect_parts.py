"""A scripted reference: log-probabilities that depend on a fault in known ways, without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from grpo_lib.algo.faults import Fault, Sight, faulty_batch
from grpo_lib.algo.packing import plan_step
from grpo_lib.interfaces import PolicyLoss
from grpo_lib.types import PackedBatch, StepPlan, TrainingSample

NAMES = ("model.embed_tokens.weight", "model.layers.0.mlp.weight", "model.norm.weight")


def scripted_plan(num_documents: int = 12, *, num_ranks: int = 1) -> StepPlan:
    """Documents of 3 prompt and 4 … 6 response tokens in groups of four, several in a row."""
    rng = np.random.default_rng(5)
    samples = []
    for index in range(num_documents):
        length = int(rng.integers(7, 10))
        mask = np.arange(length) >= 3
        samples.append(
            TrainingSample(
                sample_id=f"e0.p{index // 4}/{index % 4}",
                input_ids=rng.integers(1, 40, length),
                response_mask=mask,
                advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
                rollout_logprobs=np.zeros(length, np.float32),
            )
        )
    return plan_step(samples, num_ranks=num_ranks, pack_length=20, micro_batch_packs=2)


@dataclass
class ScriptedReference:
    """Every token's value is a fixed function of its input, label, row and the fault, so that faults differ."""

    temperature: float = 0.7
    version: int = 3
    versions: tuple[int, ...] = (0, 2, 3)
    tensor_names: tuple[str, ...] = NAMES
    tied_embedding: str | None = None
    gradients: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def logprobs(self, batch: PackedBatch, fault: Fault) -> torch.Tensor:
        batch = faulty_batch(batch, fault)
        base = -1 - torch.sin(batch.input_ids * 1.3 + batch.labels * 0.7).double().abs()
        value = base / (self.temperature if fault.temperature is None else fault.temperature)
        if fault.sight is not Sight.DOCUMENT:
            others = (batch.doc_ids > 1).double()
            value = value - others * (0.3 if fault.positions_restart else 0.5) * (1 + 0.1 * batch.num_rows)
        if fault.version is not None:
            weight = sum(0.1 + 0.04 * self.tensor_names.index(n) ** 2 for n in fault.tensors or self.tensor_names)
            value = value - weight * (self.version - fault.version) * torch.cos(batch.input_ids.double())
        if fault.bf16_weights:
            value = value + 0.01 * torch.sin(3.0 * batch.input_ids)
        if fault.head_version is not None:
            value = value - 0.2 * (self.version - fault.head_version) * torch.cos(2.0 * batch.labels)
        return value

    def hidden_states(self, batch: PackedBatch) -> Mapping[str, torch.Tensor]:
        raise NotImplementedError

    def gradient(
        self, batches: Sequence[PackedBatch], loss: PolicyLoss, *, loss_denominator: float, fault: Fault
    ) -> Mapping[str, torch.Tensor]:
        raise NotImplementedError


def batches_of(plan: StepPlan) -> tuple[PackedBatch, ...]:
    return tuple(batch for rank in plan.micro_batches for batch in rank)
