"""The seams: what a part must do to take another's place. Implementations are chosen in `stages/` only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from grpo_lib.types import (
    Bucket,
    Completion,
    GenerationRequest,
    PackedBatch,
    Prompt,
    StateKind,
    StepMetrics,
    StepPlan,
    SyncCertificate,
    Verdict,
    WeightManifest,
    WrittenFile,
)

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import torch


class PolicyLoss(Protocol):
    """Surrogate x correction + KL, composed once from the config; pure."""

    def __call__(
        self, logprobs: torch.Tensor, batch: PackedBatch, loss_denominator: float
    ) -> tuple[torch.Tensor, StepMetrics]:
        """Summed token loss of one micro-batch divided by the *global* denominator.

        Args:
            logprobs: [B, T] float32, of `batch.labels`, with gradient.
            loss_denominator: Trained tokens of the whole step over all ranks, or the configured constant.

        Returns:
            The scalar loss, and metrics computed without gradient.
        """
        ...


class StateSnapshot(Protocol):
    """One rank's share of a trainer's state, which no longer changes with it."""

    def write(self, path: Path) -> WrittenFile:
        """Write this rank's file into an existing folder, without a collective: another thread may do it."""
        ...


class TrainerBackend(Protocol):
    """One rank of a trainer. After `forward_backward` gradients are d(sum of token losses) / loss_denominator.

    Every method is collective: all ranks call it with the same number of micro-batches. Methods return only after the
    device has finished, so that a caller's timer is honest.
    """

    @property
    def policy_version(self) -> int:
        """Optimiser steps applied since the base model."""
        ...

    def forward_backward(
        self, micro_batches: Sequence[PackedBatch], loss: PolicyLoss, *, loss_denominator: float
    ) -> StepMetrics:
        """Accumulate gradients over this rank's micro-batches; nothing is applied.

        Raises:
            NonFiniteLogprobs: a trained token's log-probability is NaN or infinite.
        """
        ...

    def optim_step(self) -> StepMetrics:
        """Clip, apply one optimiser step, advance schedule and version, clear gradients.

        Reports `optim/grad_norm` (before clipping, global), `optim/lr`, `optim/update_rms`, `optim/weights_moved`.
        """
        ...

    def logprobs(self, batch: PackedBatch) -> torch.Tensor:
        """[B, T] float32 on CPU, log-probability of each label at the sampling temperature, without gradient."""
        ...

    def manifest(self) -> WeightManifest:
        """What `named_weights` yields, in order; collective-free."""
        ...

    def named_weights(self) -> Iterator[Bucket]:
        """Full plain contiguous tensors under Hugging Face names, in bounded buckets, root parameters included."""
        ...

    def snapshot(self) -> StateSnapshot:
        """Weights, optimiser, scheduler, RNG and version, copied to host memory that the next snapshot uses again."""
        ...

    def load(self, path: Path) -> None:
        """Continue from the folder that all ranks' snapshots were written to, whatever their number was."""
        ...

    def local_numel(self) -> Mapping[str, tuple[str, int]]:
        """Hugging Face name → (own parameter name, number of elements that this rank keeps); collective-free."""
        ...


class InspectableTrainer(TrainerBackend, Protocol):
    """What a backend adds to take part in parity replay and bisect. Every method is collective."""

    @property
    def policy_version(self) -> int: ...

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        """Also sets the number of steps that AdamW's bias correction counts."""
        ...

    def named_state(self, kind: StateKind) -> Iterator[Bucket]:
        """Full plain fp32 tensors under Hugging Face names, in manifest order and bounded buckets.

        Gradients are those of the summed token loss / loss_denominator over all ranks, before clipping; they exist
        between `forward_backward` and `optim_step`, which asserts.
        """
        ...

    def load_state(self, kind: StateKind, read: Callable[[str], torch.Tensor]) -> None:
        """Replace weights or a moment by `read(Hugging Face name)`, full fp32 on CPU, of which a rank keeps its part.

        Accumulated gradients are dropped. The caller sets `policy_version` afterwards.
        """
        ...

    def hidden_states(self, batch: PackedBatch) -> Iterator[tuple[str, torch.Tensor]]:
        """(``"embedding"``, ``"layer 0"`` …, [B, T, D] float32 on CPU): the residual stream after each block; no grad.

        Entries of padding are 0.
        """
        ...


class TrainerGroup(Protocol):
    """All ranks of one trainer, seen from the driver."""

    num_ranks: int
    has_reference: bool

    @property
    def policy_version(self) -> int: ...

    def forward_backward(self, plan: StepPlan, *, loss_denominator: float) -> StepMetrics: ...

    def optim_step(self) -> StepMetrics: ...

    def logprobs(self, plan: StepPlan, *, reference: bool = False) -> tuple[tuple[torch.Tensor, ...], ...]:
        """[ranks][micro-batches] of [B, T] float32, by the policy or by the frozen reference."""
        ...

    def begin_save(self, path: Path) -> None:
        """Copy the state and return; it is written to `path`, a new folder, while the ranks compute on. Waits for the
        save before this one, and raises what went wrong with it."""
        ...

    def written(self, *, wait: bool, deadline_s: float | None = None) -> tuple[WrittenFile, ...] | None:
        """All ranks' files of the save that was begun, or None while one is still being written.

        Args:
            deadline_s: None is `deadlines.train_s`.

        Raises:
            RankFailure: a rank could not write its part; the cause says why.
        """
        ...

    def load(self, path: Path) -> None: ...

    def export_hf(self, path: Path) -> None:
        """Write a folder that `transformers` and vLLM load, with the source model's config and tokenizer."""
        ...


class ReplayTrainer(TrainerGroup, Protocol):
    """A trainer that replay can drive: its state goes in and out as files of full tensors by Hugging Face name."""

    name: str

    def dump_state(self, folder: Path, kinds: Sequence[StateKind]) -> None:
        """Write ``<kind>.safetensors`` for each kind and ``state.json`` with the policy version."""
        ...

    def restore_state(self, folder: Path) -> None:
        """Weights, both moments and policy version of `dump_state(folder, TRAINING_STATE)`, of any backend."""
        ...

    def hidden_states(self, plan: StepPlan) -> tuple[tuple[dict[str, torch.Tensor], ...], ...]:
        """[ranks][micro-batches] of layer name → [B, T, D] float32, as `InspectableTrainer.hidden_states`."""
        ...


class RolloutEngine(Protocol):
    """One sampler. Illegal transitions (weights while running, submit while paused) raise."""

    @property
    def policy_version(self) -> int: ...

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests; returns at once. Request ids in flight must be unique."""
        ...

    def poll(self, timeout_s: float) -> list[Completion]:
        """Completions finished since the last poll; waits up to `timeout_s` for the first."""
        ...

    def score(self, sequences: Sequence[tuple[Sequence[int], int]]) -> list[np.ndarray]:
        """Log-probabilities of given tokens: for each (token ids, number of prompt tokens) a [R] float32 array.

        Raises:
            ValueError: the sampling temperature is not 1, where the engine cannot score as it samples.
        """
        ...

    def load_weights(self, path: Path, policy_version: int) -> None:
        """Replace the weights by those of a Hugging Face folder of the same shape."""
        ...

    def pause(self) -> None:
        """Stop stepping between two iterations; requests in flight are kept."""
        ...

    def resume(self) -> None: ...

    def close(self) -> None: ...


class WeightSync(Protocol):
    """Moves the trainer's weights to every engine and proves it."""

    def connect(self) -> None:
        """Barrier of all ranks and engines, then the transfer channel; once, with a deadline."""
        ...

    def push(self, policy_version: int) -> SyncCertificate:
        """Transfer and certify. The certificate is returned also when it is not `ok`; the caller decides."""
        ...

    def release(self) -> None:
        """Engines give their GPU memory to the trainer until the next push, and serve nothing until it is certified."""
        ...


class Verifier(Protocol):
    """Judges a text. Never raises on bad text, never evaluates it, never runs in the driver's process."""

    def __call__(self, prompt: Prompt, text: str) -> Verdict: ...


class VerifierPool(Protocol):
    """Killable worker processes that run verifiers; one verdict per submission, `FAILED` past the deadline."""

    def submit(self, key: str, prompt: Prompt, text: str) -> None: ...

    def collect(self, timeout_s: float) -> dict[str, Verdict]:
        """Verdicts finished since the last call; waits up to `timeout_s` for the first."""
        ...

    def close(self) -> None: ...


class TokenDecoder(Protocol):
    """Token ids → text without special tokens; only for verifiers and people."""

    def __call__(self, token_ids: Sequence[int]) -> str: ...


class Tracker(Protocol):
    """Where step metrics go besides the run's own files, e.g. wandb."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...
