"""The Hugging Face trainer: one rank of transformers under DeepSpeed ZeRO, stages 0 to 3.

DeepSpeed keeps the masters, reduces gradients and distributes updated weights. Names, shards by name, clipping,
learning rate, checkpoints and log-probabilities are the project's, so that both trainers mean the same by them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from grpo_lib.config import TrainerConfig
from grpo_lib.interfaces import PolicyLoss
from grpo_lib.trainers.checkpoint_folder import Snapshot, StateCopier, load_checkpoint
from grpo_lib.trainers.document_probe import check_documents_stay_apart
from grpo_lib.trainers.gradient_pass import accumulate_gradients
from grpo_lib.trainers.hf_checkpoint import HfFolder
from grpo_lib.trainers.hf_deepspeed_engine import DeepSpeedRuntime
from grpo_lib.trainers.hf_deepspeed_model import build_model, check_folder
from grpo_lib.trainers.hf_deepspeed_optim import ZeroAdamW, build_adamw
from grpo_lib.trainers.hf_deepspeed_state import (
    PartitionedState,
    ReplicatedState,
    ShardedState,
    Stage3State,
    gather,
    partitioned_part,
)
from grpo_lib.trainers.joined_documents import ROW_MULTIPLE, JoinedDocuments, WantedLabels, copied_to
from grpo_lib.trainers.labels import document_starts, successor_labels, trained_labels
from grpo_lib.trainers.output_head import HeadOptions
from grpo_lib.trainers.rank_group import ensure_group
from grpo_lib.trainers.state_parts import Part, load_part
from grpo_lib.trainers.varlen_attention import document_kernel
from grpo_lib.trainers.whole_model import in_buckets
from grpo_lib.types import TRAINING_STATE, Bucket, PackedBatch, StateKind, StepMetrics, WeightEntry, WeightManifest


class HfDeepSpeedTrainer:
    """`InspectableTrainer` on transformers and DeepSpeed. The caller joins the process group first.

    In bfloat16 the model computes with bfloat16 copies of fp32 masters; each micro-batch's gradients are widened before
    they are reduced and added up.

    Args:
        config: Optimiser, schedule, ZeRO stage, activation checkpointing, chunk and bucket sizes.
        model_path: Hugging Face folder of a qwen3, llama or olmo2 model.
        dtype: Compute dtype, ``"float32"`` or ``"bfloat16"``; masters, gradients and optimiser are fp32 either way.
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
        self.policy_version = 0  # also the step count of AdamW's bias correction
        self._config, self._correction_cap = config, correction_cap
        self._device, self._dtype = torch.device(device), getattr(torch, dtype)
        self._folder = HfFolder(model_path)
        ensure_group(self._device, rank, world_size)
        self._copier = StateCopier(self._device)
        self._runtime = DeepSpeedRuntime(config, device=self._device, dtype=self._dtype)
        kernel = document_kernel(self._device, self._dtype)
        self._is_joined = kernel is not None
        self._model = build_model(
            self._folder,
            dtype=self._dtype,
            init_context=self._runtime.init_context(),
            kernel=kernel,
            config=config,
            trainable=trainable,
            head=HeadOptions(
                temperature=temperature,
                chunk_tokens=config.logprob_chunk_tokens,
                recompute=config.logprob_recompute,
                fp32=fp32_head,
            ),
        )
        self._model.requires_grad_(trainable)
        self._parameters = dict(self._model.lm.named_parameters())  # a tied head once, under its first name
        self._shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in self._parameters.items()}
        check_folder(self._folder, self._shapes)
        self._fill_model()
        self._engine, self._state, self._optimizer = self._start(total_steps) if trainable else self._freeze()
        if trainable and self._dtype is not torch.float32:
            self._fill_masters()
        check_documents_stay_apart(
            self._score,
            vocab_size=self._model.lm.config.vocab_size,
            dtype=self._dtype,
            model_path=model_path,
        )

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
            backward=self._backward,
            drop=self._state.drop_gradients,
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
        metrics = self._optimizer.step(self.policy_version)
        self.policy_version += 1
        self._synchronize()
        return metrics

    def logprobs(self, batch: PackedBatch) -> torch.Tensor:
        """[B, T] float32 on CPU: log-probability of each token's successor in its document, 0 where there is none."""
        return self._score(batch.input_ids, successor_labels(batch), batch.doc_ids, batch.position_ids)

    def manifest(self) -> WeightManifest:
        """What `named_weights` yields, in order."""
        dtype = str(self._dtype).removeprefix("torch.")
        return WeightManifest(
            entries=tuple(WeightEntry(name=name, dtype=dtype, shape=shape) for name, shape in self._shapes.items())
        )

    def named_weights(self) -> Iterator[Bucket]:
        """Full weights in the compute dtype, under the names of the Hugging Face folder; collective.

        Under ZeRO-3 each parameter is gathered, cloned and sharded again before anything of it is yielded.
        """
        return in_buckets(self._gathered(), self._config.bucket_mib << 20)

    def snapshot(self) -> Snapshot:
        """Weights, moments, RNG and version; the schedule is a function of the version."""
        kinds = TRAINING_STATE if self._optimizer else (StateKind.WEIGHT,)
        parts = {(kind, name): self._state.own(kind, name) for kind in kinds for name in self._parameters}
        return self._copier.snapshot(parts, self._shapes, policy_version=self.policy_version)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint of any number of ranks, any ZeRO stage and any backend.

        Raises:
            DataError: the checkpoint is incomplete or of another model.
        """
        kinds = TRAINING_STATE if self._optimizer else (StateKind.WEIGHT,)
        parts = {(kind, name): self._state.held(kind, name) for kind in kinds for name in self._parameters}
        self.policy_version = load_checkpoint(path, parts=parts, shapes=self._shapes)
        self._renew()

    def local_numel(self) -> dict[str, tuple[str, int]]:
        """Hugging Face name → (own name, elements of this rank's fp32 part)."""
        return {
            name: (f"lm.{name}", self._state.held(StateKind.WEIGHT, name).values.numel()) for name in self._parameters
        }

    def named_state(self, kind: StateKind) -> Iterator[Bucket]:
        """Full fp32 tensors; see `InspectableTrainer.named_state`."""
        return in_buckets(
            ((name, gather(self._state.own(kind, name), shape)) for name, shape in self._shapes.items()),
            self._config.bucket_mib << 20,
        )

    def load_state(self, kind: StateKind, read: Callable[[str], torch.Tensor]) -> None:
        """Keep this rank's part of each full tensor; see `InspectableTrainer.load_state`."""
        assert kind in TRAINING_STATE, kind
        for name in self._parameters:
            part = self._state.held(kind, name)
            flat = read(name).flatten()
            load_part(part, lambda start, stop, flat=flat: flat[start:stop])
        self._renew()

    @torch.no_grad()
    def hidden_states(self, batch: PackedBatch) -> Iterator[tuple[str, torch.Tensor]]:
        """The residual stream [B, T, D] after the embedding and after each block; collective."""
        with self._model.recorded() as outputs:
            self.logprobs(batch)
        is_padding = (batch.doc_ids == 0)[..., None]
        documents = JoinedDocuments.of(batch.doc_ids, batch.position_ids) if self._is_joined else None
        for name, output in outputs.items():
            rows = output if documents is None else documents.in_rows(output)
            yield name, rows.float().cpu().masked_fill_(is_padding, 0)

    def _forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, doc_ids: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies [B, T] on the device, from CPU tensors [B, T]; 0 at padding."""
        documents = JoinedDocuments.of(doc_ids, position_ids).padded_to(ROW_MULTIPLE) if self._is_joined else None
        wanted = WantedLabels.of(labels, documents, self._device)
        inputs: dict[str, Any] = {"labels": wanted.labels, "positions": wanted.positions}
        if documents is None:
            document_starts(doc_ids, position_ids)  # transformers goes by the positions alone
        else:
            input_ids, position_ids = documents.joined(input_ids), documents.positions()
            bounds = torch.nn.functional.pad(documents.lens[0].cumsum(0), (1, 0)).int()
            inputs |= {"cu_lens": copied_to(bounds, self._device), "max_len": documents.max_len}
        logprobs, entropy = self._engine(
            input_ids=copied_to(input_ids, self._device), position_ids=copied_to(position_ids, self._device), **inputs
        )
        return wanted.in_rows(logprobs), wanted.in_rows(entropy)

    def _backward(self, value: torch.Tensor, is_last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(is_last)
        self._engine.backward(value * self._runtime.loss_scale, scale_wrt_gas=False)

    @torch.no_grad()
    def _score(
        self, input_ids: torch.Tensor, labels: torch.Tensor, doc_ids: torch.Tensor, position_ids: torch.Tensor
    ) -> torch.Tensor:
        return self._forward(input_ids, labels, doc_ids, position_ids)[0].cpu()

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._parameters.items():
            with self._runtime.gathered(parameter):
                tensor = parameter.detach().clone(memory_format=torch.contiguous_format)
                # The gather must be over on this rank before a consumer starts a transfer of its own.
                self._synchronize()
            assert tuple(tensor.shape) == self._shapes[name], f"{name} is still sharded: {tuple(tensor.shape)}"
            yield name, tensor

    def _start(self, total_steps: int) -> tuple[Any, ShardedState, ZeroAdamW]:
        """The engine of a policy, its state by name, and its optimiser."""
        adamw = build_adamw(list(self._parameters.values()), self._config)
        engine = self._runtime.engine(self._model, adamw)
        engine.train(self._model.lm.training)
        if self._runtime.stage == 3:
            state = Stage3State(self._parameters, engine, self._runtime, trainable=True)
        elif self._runtime.stage == 0:
            state = ReplicatedState(self._parameters, adamw)
        else:
            state = PartitionedState(self._parameters, engine.optimizer)
        optimizer = ZeroAdamW(engine, adamw, state, list(self._parameters), self._config, total_steps=total_steps)
        return engine, state, optimizer

    def _freeze(self) -> tuple[Any, ShardedState, None]:
        """A reference policy: sharded under stage 3, else whole on every rank, as nothing else of it exists."""
        if self._runtime.stage < 3:
            return self._model, ReplicatedState(self._parameters, None), None
        engine = self._runtime.engine(self._model, None)
        engine.eval()
        return engine, Stage3State(self._parameters, engine, self._runtime, trainable=False), None

    @torch.no_grad()
    def _fill_model(self) -> None:
        """This rank's part of the folder's tensors, in the compute dtype, into the model as it was built."""
        for name, parameter in self._parameters.items():
            if self._runtime.stage == 3:
                part = partitioned_part(parameter, parameter.ds_tensor)  # pyright: ignore[reportAttributeAccessIssue]
            else:
                part = Part(start=0, values=parameter.view(-1))
            load_part(part, lambda start, stop, name=name: self._folder.flat(name, start, stop))

    def _fill_masters(self) -> None:
        """The folder's own precision into the masters, which DeepSpeed made from the rounded copies."""
        for name in self._parameters:
            part = self._state.held(StateKind.WEIGHT, name)
            load_part(part, lambda start, stop, name=name: self._folder.flat(name, start, stop))

    def _renew(self) -> None:
        """After a change of the masters: what the model computes with follows, gradients are gone."""
        if self._optimizer is not None:
            self._state.publish()
            self._state.drop_gradients()

    def _synchronize(self) -> None:
        """Wait for the device, so that callers' timers and transfers see finished work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
