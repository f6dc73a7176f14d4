"""The OLMo-core trainer: one rank with OLMo-core's model, sharding and optimiser.

OLMo-core's own Trainer is not used: its optimiser step needs an attached Trainer that owns the loop, and the loop
here is the project's. Whether tensors are sharded or whole is the business of `olmo_core_weights` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh

from grpo_lib.config import TrainerConfig
from grpo_lib.interfaces import PolicyLoss
from grpo_lib.trainers.checkpoint_folder import Snapshot, StateCopier, load_checkpoint
from grpo_lib.trainers.compiled_blocks import explained_recompile_limit
from grpo_lib.trainers.document_probe import check_documents_stay_apart
from grpo_lib.trainers.gradient_pass import accumulate_gradients
from grpo_lib.trainers.hf_checkpoint import HfFolder
from grpo_lib.trainers.joined_documents import ROW_MULTIPLE, JoinedDocuments, WantedLabels, copied_to
from grpo_lib.trainers.labels import successor_labels, trained_labels
from grpo_lib.trainers.measured_adamw import local_tensor
from grpo_lib.trainers.olmo_core_model import NameMap, build_weights
from grpo_lib.trainers.olmo_core_optim import SteppedAdamW
from grpo_lib.trainers.output_head import HeadOptions
from grpo_lib.trainers.rank_group import ensure_group
from grpo_lib.trainers.state_parts import Part, load_part
from grpo_lib.trainers.whole_model import in_buckets
from grpo_lib.types import TRAINING_STATE, Bucket, PackedBatch, StateKind, StepMetrics, WeightEntry, WeightManifest


class OlmoCoreTrainer:
    """`TrainerBackend` on OLMo-core. The caller joins the process group first when there are several ranks.

    Args:
        config: Optimiser, schedule, chunk and bucket sizes.
        model_path: Hugging Face folder of a qwen3, llama or olmo2 model.
        dtype: Compute dtype, ``"float32"`` or ``"bfloat16"``; masters and moments are fp32 either way, and so are the
            sums of several micro-batches' or ranks' gradients.
        temperature: Sampling temperature that log-probabilities are taken at.
        correction_cap: Cap that the mismatch metrics count against.
        total_steps: Steps of the run, for the decaying schedules.
        rank: This rank.
        world_size: Number of ranks.
        device: ``"cpu"`` or ``"cuda"``.
        trainable: False for a frozen reference: no gradients, no optimiser.
        fp32_head: fp32 logits from bfloat16 hidden states.

    Raises:
        DataError: the folder is incomplete or its model is not supported; names file, tensor or setting.
        GrpoError: attention crosses document boundaries.
    """

    def __init__(
        self,
        *,
        config: TrainerConfig,
        model_path: Path,
        dtype: str,
        temperature: float,
        correction_cap: float,
        total_steps: int,
        rank: int,
        world_size: int,
        device: str = "cpu",
        trainable: bool = True,
        fp32_head: bool = False,
    ) -> None:
        self._policy_version = 0
        self._config, self._correction_cap = config, correction_cap
        self._device, self._dtype_name = torch.device(device), dtype
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._folder = HfFolder(model_path)
        self._copier = StateCopier(self._device)
        self._names = NameMap(self._folder.config)
        ensure_group(self._device, rank, world_size)
        self._weights = build_weights(
            self._folder,
            config=config,
            mesh=init_device_mesh(self._device.type, (world_size,), mesh_dim_names=("dp",)),
            device=self._device,
            compute_dtype=self._dtype,
            head=HeadOptions(
                temperature=temperature,
                chunk_tokens=config.logprob_chunk_tokens,
                recompute=config.logprob_recompute,
                fp32=fp32_head,
            ),
            trainable=trainable,
        )
        self._model, self._masters = self._weights.model, self._weights.masters
        self._row_multiple = ROW_MULTIPLE if self._device.type == "cuda" else 1
        self._manifest = self._plan_manifest()
        self._optimizer = (
            SteppedAdamW(self._masters, config, total_steps=total_steps, copies=self._weights.copies())
            if trainable
            else None
        )
        check_documents_stay_apart(
            self._score, vocab_size=self._model.vocab_size, dtype=self._dtype, model_path=model_path
        )

    @property
    def policy_version(self) -> int:
        """Optimiser steps applied since the base model; also the step count of AdamW's bias correction."""
        return self._policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self._policy_version = version
        if self._optimizer is not None:
            self._optimizer.set_applied_steps(version)

    def forward_backward(
        self, micro_batches: Sequence[PackedBatch], loss: PolicyLoss, *, loss_denominator: float
    ) -> StepMetrics:
        """Accumulate gradients of this rank's micro-batches; see `TrainerBackend.forward_backward`."""
        assert self._optimizer is not None, "a frozen trainer has no gradients"
        metrics = accumulate_gradients(
            micro_batches,
            loss,
            forward=lambda batch: self._forward(
                batch.input_ids, trained_labels(batch), batch.doc_ids, batch.position_ids
            ),
            backward=lambda value, is_last: self._weights.backward(value, is_last=is_last),
            drop=self._optimizer.zero_grad,
            device=self._device,
            loss_denominator=loss_denominator,
            correction_cap=self._correction_cap,
        )
        self._synchronize()
        return metrics

    def optim_step(self) -> StepMetrics:
        """One optimiser step; see `TrainerBackend.optim_step`.

        Raises:
            NonFiniteGradient: nothing is applied.
        """
        assert self._optimizer is not None, "a frozen trainer takes no steps"
        metrics = self._optimizer.step(self._policy_version)
        self._policy_version += 1
        self._synchronize()
        return metrics

    def logprobs(self, batch: PackedBatch) -> torch.Tensor:
        """[B, T] float32 on CPU: log-probability of each token's successor in its document, 0 where there is none."""
        return self._score(batch.input_ids, successor_labels(batch), batch.doc_ids, batch.position_ids)

    def manifest(self) -> WeightManifest:
        """What `named_weights` yields, in order."""
        return self._manifest

    def named_weights(self) -> Iterator[Bucket]:
        """Full weights in the compute dtype, under the names of the Hugging Face folder; collective.

        Each FSDP unit, the root with embeddings and final norm included, is gathered, cloned and sharded again before
        anything of it is yielded. A consumer may therefore stop, send or fail at any point without leaving a rank
        inside a collective or a unit unsharded.
        """
        return in_buckets(self._gathered(), self._config.bucket_mib << 20)

    def snapshot(self) -> Snapshot:
        """Weights, moments, RNG and version; the schedule is a function of the version."""
        shapes = {entry.name: entry.shape for entry in self._manifest.entries}
        return self._copier.snapshot(self._parts(), shapes, policy_version=self.policy_version)

    @torch.no_grad()
    def load(self, path: Path) -> None:
        """Continue from a checkpoint of any number of ranks and any backend.

        Raises:
            DataError: the checkpoint is incomplete or of another model.
        """
        shapes = {entry.name: entry.shape for entry in self._manifest.entries}
        self.policy_version = load_checkpoint(path, parts=self._parts(), shapes=shapes)
        self._weights.publish()
        if self._optimizer is not None:
            self._optimizer.zero_grad()

    def local_numel(self) -> dict[str, tuple[str, int]]:
        """Hugging Face name → (own name, elements of this rank's shard)."""
        return {
            self._names.hf(name): (name, local_tensor(parameter).numel())
            for name, parameter in self._model.named_parameters()
        }

    def named_state(self, kind: StateKind) -> Iterator[Bucket]:
        """Full fp32 tensors; see `InspectableTrainer.named_state`."""
        tensors = {self._names.hf(name): self._state(kind, master) for name, master in self._masters.named_parameters()}
        return in_buckets(
            ((entry.name, self._weights.full(tensors[entry.name])) for entry in self._manifest.entries),
            self._config.bucket_mib << 20,
        )

    @torch.no_grad()
    def load_state(self, kind: StateKind, read: Callable[[str], torch.Tensor]) -> None:
        """Keep this rank's rows of each full tensor; see `InspectableTrainer.load_state`."""
        assert kind in TRAINING_STATE, kind
        for name, master in self._masters.named_parameters():
            flat = read(self._names.hf(name)).flatten()
            part = self._weights.part(self._state(kind, master))
            load_part(part, lambda start, stop, flat=flat: flat[start:stop])
        self._weights.publish()
        if self._optimizer is not None:
            self._optimizer.zero_grad()

    @torch.no_grad()
    def hidden_states(self, batch: PackedBatch) -> Iterator[tuple[str, torch.Tensor]]:
        """The residual stream [B, T, D] after the embedding and after each block; collective."""
        seen: list[tuple[str, torch.Tensor]] = []

        def keep(name: str) -> Callable[..., None]:
            return lambda module, inputs, output: seen.append((name, output.float().cpu()))

        modules = {"embedding": self._model.embeddings}
        modules |= {f"layer {index}": block for index, block in enumerate(self._model.blocks.values())}
        hooks = [module.register_forward_hook(keep(name)) for name, module in modules.items()]
        try:
            self.logprobs(batch)
        finally:
            for hook in hooks:
                hook.remove()
        documents = JoinedDocuments.of(batch.doc_ids, batch.position_ids)
        is_padding = (batch.doc_ids == 0)[..., None]
        for name, row in seen:
            yield name, documents.in_rows(row).masked_fill_(is_padding, 0)

    def _forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, doc_ids: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies [B, T] on the device, from CPU tensors [B, T]; 0 at padding."""
        documents = JoinedDocuments.of(doc_ids, position_ids).padded_to(self._row_multiple)
        wanted = WantedLabels.of(labels, documents, self._device)
        # Both `doc_lens` and `max_doc_lens` or neither: OLMo-core ignores one alone without a word. The lengths stay on
        # the CPU, where it adds them up for all blocks.
        with explained_recompile_limit():
            logprobs, entropy = self._model(
                copied_to(documents.joined(input_ids), self._device),
                labels=wanted.labels[None],
                logits_to_keep=wanted.positions[None],
                doc_lens=documents.lens,
                max_doc_lens=[documents.max_len],
            )
        return wanted.in_rows(logprobs), wanted.in_rows(entropy)

    @torch.no_grad()
    def _score(
        self, input_ids: torch.Tensor, labels: torch.Tensor, doc_ids: torch.Tensor, position_ids: torch.Tensor
    ) -> torch.Tensor:
        try:
            logprobs, _ = self._forward(input_ids, labels, doc_ids, position_ids)
            return logprobs.cpu()
        finally:
            self._weights.release()

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights in manifest order, one unit after the other."""
        planned = iter(self._manifest.entries)
        for unit in range(len(self._weights.units)):
            for name, tensor in self._weights.gathered(unit):
                dtype = str(tensor.dtype).removeprefix("torch.")
                entry = WeightEntry(name=self._names.hf(name), dtype=dtype, shape=tuple(tensor.shape))
                expected = next(planned)
                assert entry == expected, f"sending {entry}, the manifest says {expected}"
                yield entry.name, tensor
        assert next(planned, None) is None, "the manifest lists tensors that were not sent"

    def _state(self, kind: StateKind, master: torch.nn.Parameter) -> torch.Tensor:
        """The tensor of a kind as this rank has it."""
        if kind is StateKind.WEIGHT:
            return master.detach()
        if kind is StateKind.GRADIENT:
            assert master.grad is not None, "no gradient outside of forward_backward … optim_step"
            return master.grad
        assert self._optimizer is not None, "a frozen trainer has no optimiser state"
        return self._optimizer.adamw.state[master][kind.value]

    def _parts(self) -> dict[tuple[StateKind, str], Part]:
        kinds = TRAINING_STATE if self._optimizer else (StateKind.WEIGHT,)
        return {
            (kind, self._names.hf(name)): self._weights.part(self._state(kind, master))
            for kind in kinds
            for name, master in self._masters.named_parameters()
        }

    def _plan_manifest(self) -> WeightManifest:
        shapes = {name: tuple(parameter.shape) for name, parameter in self._model.named_parameters()}
        owned = sorted(self._names.hf(name) for names in self._weights.units for name in names)
        expected = sorted(self._names.hf(name) for name in self._names.trainer_names)
        assert owned == expected, f"the units own {owned}, the model folder has {expected}"
        return WeightManifest(
            entries=tuple(
                WeightEntry(name=self._names.hf(name), dtype=self._dtype_name, shape=shapes[name])
                for names in self._weights.units
                for name in names
            )
        )

    def _synchronize(self) -> None:
        """Wait for the device, so that callers' timers and transfers see finished work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
