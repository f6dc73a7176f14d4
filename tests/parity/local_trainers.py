"""A trainer of one rank in this process, as replay drives it, and the mistakes that one can make with it.

A saboteur wraps a real backend, or patches one point of it, and leaves everything else as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from grpo_lib.algo.losses import build_loss
from grpo_lib.config import RunConfig
from grpo_lib.interfaces import InspectableTrainer
from grpo_lib.trainers.whole_model import dump_state, restore_state
from grpo_lib.types import PackedBatch, StateKind, StepMetrics, StepPlan


class LocalTrainer:
    """`ReplayTrainer` of one rank."""

    num_ranks = 1
    has_reference = False

    def __init__(self, backend: InspectableTrainer, config: RunConfig, *, name: str) -> None:
        self.backend, self.name = backend, name
        self._loss = build_loss(config.algorithm)

    @property
    def policy_version(self) -> int:
        return self.backend.policy_version

    def forward_backward(self, plan: StepPlan, *, loss_denominator: float) -> StepMetrics:
        return self.backend.forward_backward(plan.micro_batches[0], self._loss, loss_denominator=loss_denominator)

    def optim_step(self) -> StepMetrics:
        return self.backend.optim_step()

    def logprobs(self, plan: StepPlan, *, reference: bool = False) -> tuple[tuple[torch.Tensor, ...], ...]:
        assert not reference
        return (tuple(self.backend.logprobs(batch) for batch in plan.micro_batches[0]),)

    def hidden_states(self, plan: StepPlan) -> tuple[tuple[dict[str, torch.Tensor], ...], ...]:
        return (tuple(dict(self.backend.hidden_states(batch)) for batch in plan.micro_batches[0]),)

    def dump_state(self, folder: Path, kinds: Sequence[StateKind]) -> None:
        dump_state(self.backend, folder, kinds)

    def restore_state(self, folder: Path) -> None:
        restore_state(self.backend, folder)

    def save(self, path: Path) -> None:
        self.backend.save(path)

    def load(self, path: Path) -> None:
        self.backend.load(path)

    def export_hf(self, path: Path) -> None:
        raise NotImplementedError("replay exports nothing")


def build_backend(name: str, config: RunConfig, model: Path, **options: Any) -> Any:
    """A real backend as `stages.trainer_rank.build_trainer` makes it, on one rank."""
    from grpo_lib.stages.trainer_rank import build_trainer

    changed = config.model_copy(
        update={"trainer": config.trainer.model_copy(update={"backend": name, "num_ranks": 1, **options})}
    )
    return build_trainer(changed, model, 0, trainable=True)


class Wrapped:
    """Everything of a backend, with methods that a saboteur overrides."""

    def __init__(self, backend: Any) -> None:
        object.__setattr__(self, "_backend", backend)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._backend, name, value) if name == "policy_version" else object.__setattr__(self, name, value)


class ChangedBatches(Wrapped):
    """Sees other batches than it was given, in scoring and in training."""

    def __init__(self, backend: Any, change: Callable[[PackedBatch], PackedBatch]) -> None:
        super().__init__(backend)
        self._change = change

    def logprobs(self, batch: PackedBatch) -> torch.Tensor:
        return self._backend.logprobs(self._change(batch))

    def forward_backward(
        self, micro_batches: Sequence[PackedBatch], loss: Any, *, loss_denominator: float
    ) -> StepMetrics:
        changed = [self._change(batch) for batch in micro_batches]
        return self._backend.forward_backward(changed, loss, loss_denominator=loss_denominator)

    def hidden_states(self, batch: PackedBatch) -> Any:
        return self._backend.hidden_states(self._change(batch))


def labels_one_later(batch: PackedBatch) -> PackedBatch:
    """Every position is scored against the token after the next."""
    return replace(batch, labels=batch.labels.roll(-1, dims=1))


def one_document_per_row(batch: PackedBatch) -> PackedBatch:
    """All boundaries of a row are lost, and with them where positions restart: a causal model over the whole row."""
    is_real = batch.doc_ids > 0
    index = torch.arange(batch.doc_ids.shape[1]).expand_as(batch.doc_ids)
    num_real = is_real.sum(1, keepdim=True)
    return replace(
        batch, doc_ids=is_real.long(), position_ids=torch.where(is_real, index, index - num_real).contiguous()
    )


class SkippedStep(Wrapped):
    """Reports a step and takes none."""

    def optim_step(self) -> StepMetrics:
        before = {
            kind: {n: t.clone() for bucket in self._backend.named_state(kind) for n, t in bucket.tensors}
            for kind in (StateKind.WEIGHT, StateKind.FIRST_MOMENT, StateKind.SECOND_MOMENT)
        }
        metrics = self._backend.optim_step()
        version = self._backend.policy_version
        for kind, tensors in before.items():
            self._backend.load_state(kind, tensors.__getitem__)
        self._backend.policy_version = version
        return metrics


class Bf16Masters(Wrapped):
    """Keeps the weights that the optimiser updates in bfloat16."""

    def optim_step(self) -> StepMetrics:
        metrics = self._backend.optim_step()
        version = self._backend.policy_version
        weights = {n: t for bucket in self._backend.named_state(StateKind.WEIGHT) for n, t in bucket.tensors}
        self._backend.load_state(StateKind.WEIGHT, lambda name: weights[name].bfloat16().float())
        self._backend.policy_version = version
        return metrics


class SwappedAdvantages(ChangedBatches):
    """Trains two groups with each other's advantages, member by member."""

    def __init__(self, backend: Any, one: str, other: str, advantages: dict[str, float]) -> None:
        partner = {one: other, other: one}

        def change(batch: PackedBatch) -> PackedBatch:
            changed = batch.advantages.clone()
            for row, sample_ids in enumerate(batch.sample_ids):
                for doc_id, sample_id in enumerate(sample_ids, start=1):
                    group, index = sample_id.rsplit("/", 1)
                    if group in partner:
                        places = (batch.doc_ids[row] == doc_id) & batch.response_mask[row]
                        changed[row, places] = advantages[f"{partner[group]}/{index}"]
            return replace(batch, advantages=changed)

        super().__init__(backend, change)


class OwnDenominators(Wrapped):
    """Divides each micro-batch's loss by that micro-batch's own tokens."""

    def forward_backward(
        self, micro_batches: Sequence[PackedBatch], loss: Any, *, loss_denominator: float
    ) -> StepMetrics:
        def own(logprobs: torch.Tensor, batch: PackedBatch, _: float) -> tuple[torch.Tensor, StepMetrics]:
            return loss(logprobs, batch, max(1, batch.num_trained_tokens))

        return self._backend.forward_backward(micro_batches, own, loss_denominator=loss_denominator)
