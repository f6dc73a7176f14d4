"""The mistakes of the sabotage suite: each wraps a real backend or patches one point of it, the rest stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from grpo_lib.types import TRAINING_STATE, PackedBatch, StateKind, StepMetrics


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


class SkippedStep(Wrapped):
    """Reports a step and takes none."""

    def optim_step(self) -> StepMetrics:
        before = {
            kind: {n: t.clone() for bucket in self._backend.named_state(kind) for n, t in bucket.tensors}
            for kind in TRAINING_STATE
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


class RankDenominator(Wrapped):
    """Divides a rank's loss by the rank's own tokens."""

    def forward_backward(
        self, micro_batches: Sequence[PackedBatch], loss: Any, *, loss_denominator: float
    ) -> StepMetrics:
        own = sum(batch.num_trained_tokens for batch in micro_batches)
        return self._backend.forward_backward(micro_batches, loss, loss_denominator=max(1, own))


class UntiedHead(torch.nn.Module):
    """An output head with a weight of its own, equal to the embedding at first."""

    def __init__(self, embedding: torch.Tensor, learning_rate: float) -> None:
        super().__init__()
        # No Parameter: the backend's list of tensors must not grow, as it does not for a head that lost its tie.
        self.weight = embedding.detach().clone().requires_grad_()
        self.adamw = torch.optim.AdamW([self.weight], lr=learning_rate, weight_decay=0.0)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden, self.weight)


class UntiedTrainer(Wrapped):
    """Steps the head's own weight too, which nothing outside sees."""

    def __init__(self, backend: Any, head: UntiedHead) -> None:
        super().__init__(backend)
        object.__setattr__(self, "_head", head)

    def optim_step(self) -> StepMetrics:
        self._head.adamw.step()
        self._head.adamw.zero_grad()
        return self._backend.optim_step()


def untie_head(backend: Any, learning_rate: float) -> UntiedTrainer:
    name = "model.embed_tokens.weight"
    embedding = next(t for bucket in backend.named_state(StateKind.WEIGHT) for n, t in bucket.tensors if n == name)
    head = UntiedHead(embedding, learning_rate)
    if is_olmo(backend):
        backend._model.lm_head.w_out = head
    else:
        backend._model.head._projection = (head,)
    return UntiedTrainer(backend, head)


def is_olmo(backend: Any) -> bool:
    return type(backend).__name__ == "OlmoCoreTrainer"


def drop_boundaries(backend: Any) -> Any:
    """Attention over everything before a token, while positions restart with each document."""
    if is_olmo(backend):
        for block in backend._model.blocks.values():
            block.attention.backend._buckets = _OneDocument()
    else:
        _change_inputs(backend, documents=_one_document_a_row)
    return backend


class _OneDocument:
    """All tokens of the joined row as one document."""

    def get(self, cu_doc_lens: torch.Tensor) -> Any:
        from grpo_lib.trainers.olmo_core_attention import DocumentBuckets

        return DocumentBuckets.of(cu_doc_lens[[0, -1]])


def lose_doc_lens(backend: Any) -> Any:
    """Boundaries never reach the model, neither its attention nor its positions."""
    assert is_olmo(backend)
    drop_boundaries(backend)
    return run_positions_on(backend)


def run_positions_on(backend: Any) -> Any:
    """Positions count through the row. Attention of the Hugging Face trainer goes by them too; OLMo-core's does not."""
    if is_olmo(backend):
        for block in backend._model.blocks.values():
            rope = block.attention.rope
            forward = rope.forward
            rope.forward = lambda *args, forward=forward, **options: forward(*args, **{**options, "cu_doc_lens": None})
    else:
        _change_inputs(backend, position_ids=_run_on, documents=_one_document_a_row)
    return backend


def _run_on(input_ids: torch.Tensor) -> torch.Tensor:
    """Positions that count through each row."""
    return torch.arange(input_ids.shape[1]).expand_as(input_ids)


def _one_document_a_row(input_ids: torch.Tensor) -> Any:
    from grpo_lib.trainers.hf_deepspeed_attention import DocumentGroups

    return DocumentGroups.of(_run_on(input_ids))


def _change_inputs(backend: Any, **changes: Callable[[torch.Tensor], Any]) -> None:
    """Give the Hugging Face model other arguments than the backend does, made from its input ids."""

    def hook(_module: Any, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**options, **{name: make(options["input_ids"]) for name, make in changes.items()}}

    backend._model.body.register_forward_pre_hook(hook, with_kwargs=True)
