"""One trainer rank inside its own process: backend, reference, weight sender. Imports are heavy, so they wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_lib.algo.losses import build_loss
from grpo_lib.config import RunConfig
from grpo_lib.distributed.process_group import Rendezvous, host_store, init_ranks
from grpo_lib.trainers.checkpoint_folder import WriteBehind
from grpo_lib.trainers.hf_checkpoint import HfFolder
from grpo_lib.trainers.whole_model import dump_state, export_hf, load_hf_weights, restore_state, shard_report
from grpo_lib.types import PackedBatch, SenderReport, ShardedTensor, StateKind, StepMetrics, WrittenFile
from grpo_lib.weight_sync.sender import EngineClient, WeightSender

if TYPE_CHECKING:
    import torch
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] documented, not in __all__

    from grpo_lib.interfaces import InspectableTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRankFactory:
    """Picklable recipe of one rank; the process that calls it hosts the rank.

    Args:
        model_path: Base model, a Hugging Face folder.
        checkpoint: Sharded checkpoint to continue from; None starts from the base model.
    """

    config: RunConfig
    model_path: Path
    rank: int
    checkpoint: Path | None = None

    def __call__(self) -> TrainerRank:
        return TrainerRank(self)


class TrainerRank:
    """Starts in two stages: the constructor is cheap, so that rank 0 can say where it listens; `setup` is not."""

    def __init__(self, recipe: TrainerRankFactory) -> None:
        self._recipe = recipe
        self._rendezvous: Rendezvous | None = None
        self._store: TCPStore | None = None  # of the first rank
        self._loss = build_loss(recipe.config.algorithm)
        self._writer = WriteBehind()

    def listen_address(self) -> tuple[str, int]:
        """(address, port) where this rank, the first, waits for the others from now on."""
        config = self._recipe.config
        address = "127.0.0.1"
        self._store = host_store(address, config.trainer.num_ranks, timeout_s=config.deadlines.ranks_start_s)
        return address, self._store.port

    def setup(self, address: str, port: int) -> int:
        """Join the other ranks and load the model; returns the policy version."""
        recipe = self._recipe
        deadlines = recipe.config.deadlines
        self._rendezvous = init_ranks(
            rank=recipe.rank,
            world_size=recipe.config.trainer.num_ranks,
            address=address,
            port=port,
            backend="nccl" if recipe.config.runtime.gpus_per_rank > 0 else "gloo",
            timeout_s=deadlines.ranks_start_s,
            # A rank that waits in a collective for a slow one must not give up before the driver's own deadline.
            collective_timeout_s=max(deadlines.ranks_start_s, deadlines.train_s, deadlines.weight_sync_s),
            store=self._store,
        )
        self._backend = build_trainer(recipe.config, recipe.model_path, recipe.rank, trainable=True)
        if recipe.checkpoint is not None:
            self._backend.load(recipe.checkpoint)
        self._reference = (
            build_trainer(recipe.config, recipe.model_path, recipe.rank, trainable=False)
            if recipe.config.algorithm.kl_beta > 0
            else None
        )
        self._sender = WeightSender(self._backend, backend=recipe.config.weight_sync.backend, rank=recipe.rank)
        return self._backend.policy_version

    @property
    def policy_version(self) -> int:
        return self._backend.policy_version

    def barrier(self, name: str, deadline_s: float) -> None:
        assert self._rendezvous is not None, "setup comes first"
        self._rendezvous.barrier(name, deadline_s=deadline_s)

    def connect_sender(self, client: EngineClient | None, *, port: int, timeout_s: float) -> None:
        self._sender.connect(client, port=port, timeout_s=timeout_s)

    def push_weights(self, policy_version: int) -> SenderReport:
        return self._sender.push(policy_version)

    def forward_backward(self, micro_batches: Sequence[PackedBatch], *, loss_denominator: float) -> StepMetrics:
        return self._backend.forward_backward(micro_batches, self._loss, loss_denominator=loss_denominator)

    def optim_step(self) -> StepMetrics:
        return self._backend.optim_step()

    def logprobs(self, micro_batches: Sequence[PackedBatch], *, reference: bool = False) -> list[torch.Tensor]:
        backend = self._backend
        if reference:
            assert self._reference is not None, "kl_beta is 0: no reference policy is loaded"
            backend = self._reference
        return [backend.logprobs(batch) for batch in micro_batches]

    def begin_save(self, path: Path) -> None:
        self._writer.begin(path, self._backend.snapshot)

    def written(self, *, wait: bool) -> WrittenFile | None:
        return self._writer.written(wait=wait)

    def load(self, path: Path) -> None:
        self._backend.load(path)

    def export_hf(self, path: Path) -> None:
        export_hf(self._backend, path, source=self._recipe.model_path, dtype=self._recipe.config.model.dtype)

    def shard_report(self) -> tuple[ShardedTensor, ...]:
        return shard_report(self._backend, HfFolder(self._recipe.model_path), dtype=self._recipe.config.model.dtype)

    def dump_state(self, folder: Path, kinds: Sequence[StateKind]) -> None:
        dump_state(self._backend, folder, kinds)

    def restore_state(self, folder: Path) -> None:
        restore_state(self._backend, folder)

    def load_hf_weights(self, path: Path) -> None:
        load_hf_weights(self._backend, HfFolder(path))

    def hidden_states(self, micro_batches: Sequence[PackedBatch]) -> list[dict[str, torch.Tensor]]:
        return [dict(self._backend.hidden_states(batch)) for batch in micro_batches]

    def close(self) -> None:
        self._writer.close()
        self._sender.close()


def build_trainer(config: RunConfig, model_path: Path, rank: int, *, trainable: bool) -> InspectableTrainer:
    """The configured backend on this rank. A new backend is one more branch in `backend_class`."""
    return backend_class(config.trainer.backend)(
        config=config.trainer,
        model_path=model_path,
        dtype=config.model.dtype,
        temperature=config.rollout.temperature,
        correction_cap=config.algorithm.correction_cap,
        total_steps=config.loop.steps,
        rank=rank,
        world_size=config.trainer.num_ranks,
        device="cuda" if config.runtime.gpus_per_rank > 0 else "cpu",
        trainable=trainable,
        fp32_head=config.model.fp32_head,
    )


def backend_class(name: str) -> Callable[..., InspectableTrainer]:
    """Imported when it is chosen: each backend brings a package that the other does not need."""
    if name == "hf_deepspeed":
        from grpo_lib.trainers.hf_deepspeed import HfDeepSpeedTrainer

        return HfDeepSpeedTrainer
    from grpo_lib.trainers.olmo_core import OlmoCoreTrainer

    return OlmoCoreTrainer
