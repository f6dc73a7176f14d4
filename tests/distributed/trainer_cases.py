"""What the trainer tests run: a configuration, samples, and the functions that ranks execute.

`BACKENDS` is the list that every test of the contract is parametrised over; a new backend adds one `BackendCase`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from grpo_lib.algo.losses import build_loss
from grpo_lib.algo.packing import pack, plan_step, unpack_tokens
from grpo_lib.config import AlgorithmConfig, TrainerConfig
from grpo_lib.interfaces import InspectableTrainer, PolicyLoss
from grpo_lib.stages.trainer_rank import backend_class
from grpo_lib.types import PackedBatch, StateKind, StepMetrics, StepPlan, TrainingSample
from tests.tiny_models import PADDING_TOKEN, VOCAB

TEMPERATURE = 0.7
CORRECTION_CAP = 2.0
TOTAL_STEPS = 6
PACK_LENGTH = 32

# An epsilon of 1e-5 keeps AdamW's update a smooth function of the gradient. At 1e-8 an element whose gradient is
# rounding noise moves by the whole learning rate, in a direction that no two correct trainers agree on.
CONFIG = TrainerConfig(
    pack_length=PACK_LENGTH,
    learning_rate=1e-3,
    lr_scheduler="linear",
    warmup_steps=2,
    adam_eps=1e-5,
    weight_decay=0.1,
    max_grad_norm=0.05,
    logprob_chunk_tokens=7,
    bucket_mib=1,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What one backend did with one plan, as plain arrays by sample id or Hugging Face name."""

    logprobs: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray]
    metrics: StepMetrics  # of the first forward_backward
    steps: list[dict[str, float]]  # of each optim_step
    weights: dict[int, dict[str, np.ndarray]]  # after that many steps
    versions: list[int]


def samples() -> list[TrainingSample]:
    """Nine documents of 5 … 20 tokens whose sampler log-probabilities reach both sides of the correction's cap.

    Some hold the models' padding token, as a stop token that pads often does: it is trained like any other.
    """
    rng = np.random.default_rng(7)
    result = []
    for index, length in enumerate((5, 20, 9, 7, 13, 11, 6, 17, 8)):
        mask = np.arange(length) >= int(rng.integers(1, length - 2))
        result.append(
            TrainingSample(
                sample_id=f"e0.p{index}/0",
                input_ids=np.where(rng.random(length) < 0.1, PADDING_TOKEN, rng.integers(3, VOCAB, length)),
                response_mask=mask,
                advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
                rollout_logprobs=np.where(mask, rng.normal(-4.5, 1.5, length), 0).astype(np.float32),
            )
        )
    return result


def policy_loss() -> PolicyLoss:
    return build_loss(AlgorithmConfig(loss="dapo", correction="tis", correction_cap=CORRECTION_CAP))


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendCase:
    """A backend and the settings it is tested under."""

    name: str
    backend: str
    settings: Mapping[str, Any] = field(default_factory=dict)  # of TrainerConfig

    def build(
        self, rank: int, num_ranks: int, model: Path, *, config: TrainerConfig = CONFIG, **options: Any
    ) -> InspectableTrainer:
        """One rank's trainer, with what `stages.trainer_rank.build_trainer` takes from the run's configuration."""
        defaults = {
            "dtype": "float32",
            "temperature": TEMPERATURE,
            "correction_cap": CORRECTION_CAP,
            "total_steps": TOTAL_STEPS,
        }
        return backend_class(self.backend)(
            config=config.model_copy(update=dict(self.settings)),
            model_path=model,
            rank=rank,
            world_size=num_ranks,
            **{**defaults, **options},
        )


OLMO_CORE = BackendCase(name="olmo_core", backend="olmo_core")
ZERO = tuple(
    BackendCase(name=f"hf_deepspeed_zero{stage}", backend="hf_deepspeed", settings={"zero_stage": stage})
    for stage in range(4)
)
BACKENDS = (OLMO_CORE, ZERO[0], ZERO[2], ZERO[3])  # stage 1 keeps its state as stage 2 does, and has a test of its own
BF16_BACKENDS = (OLMO_CORE, ZERO[2], ZERO[3])  # a rule refuses the others

each_backend = pytest.mark.parametrize("case", BACKENDS, ids=lambda case: case.name)
each_bf16_backend = pytest.mark.parametrize("case", BF16_BACKENDS, ids=lambda case: case.name)


def record(rank: int, num_ranks: int, case: BackendCase, model: Path, plan: StepPlan, num_steps: int) -> Record:
    """Score, differentiate and take `num_steps` steps on one plan; every rank returns the same but `metrics`."""
    trainer = case.build(rank, num_ranks, model)
    loss, denominator = policy_loss(), float(plan.num_trained_tokens)
    own = plan.micro_batches[rank]
    scored = {key: value for batch in own for key, value in unpack_tokens(batch, trainer.logprobs(batch)).items()}
    metrics = trainer.forward_backward(own, loss, loss_denominator=denominator)
    gradients = state_of(trainer, StateKind.GRADIENT)
    steps, versions, weights = [], [trainer.policy_version], {}
    for step in range(1, num_steps + 1):
        if step > 1:
            trainer.forward_backward(own, loss, loss_denominator=denominator)
        steps.append(trainer.optim_step().values())
        versions.append(trainer.policy_version)
        if step in (1, num_steps):
            weights[step] = weights_of(trainer)
    return Record(
        logprobs=scored,
        gradients=gradients,
        metrics=metrics,
        steps=steps,
        weights=weights,
        versions=versions,
    )


def merge(records: Sequence[Record]) -> Record:
    """All ranks' records as one, after checking that what must agree between ranks does."""
    first = records[0]
    for other in records[1:]:
        assert other.steps == first.steps
        assert other.versions == first.versions
        for name, tensor in first.gradients.items():
            np.testing.assert_array_equal(tensor, other.gradients[name])
    return Record(
        logprobs={key: value for r in records for key, value in r.logprobs.items()},
        gradients=first.gradients,
        metrics=StepMetrics.merged([r.metrics for r in records]),
        steps=first.steps,
        weights=first.weights,
        versions=first.versions,
    )


def weights_of(trainer: InspectableTrainer) -> dict[str, np.ndarray]:
    return {name: tensor.float().numpy() for bucket in trainer.named_weights() for name, tensor in bucket.tensors}


def state_of(trainer: InspectableTrainer, kind: StateKind) -> dict[str, np.ndarray]:
    """Copies, because clipping and steps work in place."""
    return {name: tensor.numpy().copy() for bucket in trainer.named_state(kind) for name, tensor in bucket.tensors}


def padding_batch(num_rows: int) -> PackedBatch:
    """A micro-batch of padding only, as a rank gets when its share of the rows has run out."""
    zeros = torch.zeros(num_rows, PACK_LENGTH, dtype=torch.int64)
    return PackedBatch(
        input_ids=zeros,
        labels=zeros,
        position_ids=torch.arange(PACK_LENGTH).expand(num_rows, -1).contiguous(),
        doc_ids=zeros,
        response_mask=zeros.bool(),
        advantages=zeros.float(),
        rollout_logprobs=zeros.float(),
        sample_ids=((),) * num_rows,
    )


PLAN = plan_step(samples(), num_ranks=2, pack_length=PACK_LENGTH, micro_batch_packs=1)
ONE_RANK_PLAN = plan_step(samples(), num_ranks=1, pack_length=PACK_LENGTH, micro_batch_packs=2)


def save(trainer: InspectableTrainer, folder: Path) -> None:
    """Every rank writes its part and waits for the others; collective."""
    folder.mkdir(parents=True, exist_ok=True)
    trainer.snapshot().write(folder)
    dist.barrier()


def train(trainer: InspectableTrainer, rank: int, plan: StepPlan, num_steps: int) -> list[dict[str, float]]:
    """Take steps on one plan; returns the metrics of each `optim_step`."""
    steps = []
    for _ in range(num_steps):
        trainer.forward_backward(
            plan.micro_batches[rank], policy_loss(), loss_denominator=float(plan.num_trained_tokens)
        )
        steps.append(trainer.optim_step().values())
    return steps


def score(trainer: InspectableTrainer) -> dict[str, np.ndarray]:
    """Log-probabilities of the trained tokens by sample, from packs; collective."""
    batch = pack(samples(), PACK_LENGTH)
    return unpack_tokens(batch, trainer.logprobs(batch))


def largest_difference(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    assert a.keys() == b.keys()
    return max(float(np.abs(a[name] - b[name]).max()) for name in a)


def hf_scores(model: Path, dtype: torch.dtype) -> dict[str, np.ndarray]:
    """The same by Hugging Face's model, each document alone."""
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="sdpa").eval()
    scores = {}
    for sample in samples():
        ids = torch.from_numpy(sample.input_ids)
        with torch.no_grad():
            log_softmax = torch.log_softmax(hf(ids[None]).logits[0].float() / TEMPERATURE, dim=-1)
        picked = log_softmax[:-1].gather(1, ids[1:, None])[:, 0].numpy()
        scores[sample.sample_id] = picked[sample.response_mask[1:]]
    return scores
