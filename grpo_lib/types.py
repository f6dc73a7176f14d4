"""The data that crosses seams: frozen, checked on construction, shapes on the fields.

Until `algo.packing.pack` every per-token array is *token-aligned*: entry t describes token t. Every tensor of a
`PackedBatch` is *label-aligned*: entry t describes the prediction of `labels[t]`, the token after position t in the
same document. The shift happens once, in `pack`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


class FinishReason(StrEnum):
    """Why a completion ended. Only `STOP` and `LENGTH` completions are ever trained on."""

    STOP = "stop"  # a stop token was sampled; it is the last token and is trained
    LENGTH = "length"  # `max_tokens` reached: truncated
    ABORT = "abort"  # cancelled by us or the engine: a fragment


class VerdictState(StrEnum):
    """`VALID`: judged, any reward; `ZERO`: nothing to judge (no answer found); `FAILED`: the judge itself failed."""

    VALID = "valid"
    ZERO = "zero"
    FAILED = "failed"


class VerdictReason(StrEnum):
    """Why a verifier decided as it did."""

    CORRECT = "correct"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"
    TIMEOUT = "timeout"
    CRASH = "crash"


class GroupStatus(StrEnum):
    """What became of a group: trained, or excluded and why."""

    KEPT = "kept"
    ZERO_SPREAD_LOW = "zero_spread_low"  # all rewards equal, at or below the middle of the reward range
    ZERO_SPREAD_HIGH = "zero_spread_high"  # all rewards equal, above it
    EXCLUDED = "excluded"  # too few judged, unaborted members to compare


class ParityVerdict(StrEnum):
    """Outcome of one check or of a whole report. Too little evidence is INCONCLUSIVE, never PASS."""

    PASS = "PASS"
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of a prompt shard. `prompt_id` is unique by occurrence: a duplicated row is two prompts."""

    prompt_id: str
    text: str  # the exact text that was tokenized, template included
    token_ids: tuple[int, ...]
    answer: str
    dataset: str
    verifier: str

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError(f"prompt {self.prompt_id!r} has no tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the engine draws tokens. Log-probabilities are those of the distribution actually sampled from."""

    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    greedy: bool = False  # argmax decoding; `temperature` then only scales the reported log-probabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One completion to draw: token ids in, never text."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int  # distinct for each member of a group, see `seeds.sample_seed`


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens [start, stop) of a completion were sampled by policy `version`."""

    version: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """What the engine returned for one request; ids are kept as sampled and never re-tokenized."""

    request_id: str
    token_ids: np.ndarray  # [R] int64, stop token included
    logprobs: np.ndarray  # [R] float32, of each sampled token
    version_spans: tuple[VersionSpan, ...]  # cover [0, R) without gaps
    finish_reason: FinishReason
    seed: int
    latency_s: float  # submit to finish, seconds

    def __post_init__(self) -> None:
        if self.token_ids.dtype != np.int64 or self.logprobs.dtype != np.float32:
            raise ValueError(
                f"completion {self.request_id}: token_ids must be int64 and logprobs float32, "
                f"got {self.token_ids.dtype} and {self.logprobs.dtype}"
            )
        if self.token_ids.shape != self.logprobs.shape or self.token_ids.ndim != 1:
            raise ValueError(
                f"completion {self.request_id}: {self.token_ids.shape} token ids but {self.logprobs.shape} logprobs"
            )
        expected = 0
        for span in self.version_spans:
            if span.start != expected or span.stop <= span.start:
                raise ValueError(f"completion {self.request_id}: version spans {self.version_spans} leave a gap")
            expected = span.stop
        if expected != len(self.token_ids):
            raise ValueError(
                f"completion {self.request_id}: version spans cover {expected} of {len(self.token_ids)} tokens"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A verifier's judgement of one completion text."""

    state: VerdictState
    reward: float
    reason: VerdictReason
    extracted: str | None = None  # the answer that was compared
    elapsed_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """A judged completion: one member of a group."""

    sample_index: int  # 0 … group_size - 1
    completion: Completion
    text: str  # decoded completion without special tokens; for the verifier and for people only
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutGroup:
    """All rollouts of one prompt at one visit; advantages are computed inside it and nowhere else."""

    group_id: str  # f"e{epoch}.{prompt_id}"
    prompt: Prompt
    rollouts: tuple[Rollout, ...]

    def __post_init__(self) -> None:
        if [r.sample_index for r in self.rollouts] != list(range(len(self.rollouts))):
            raise ValueError(
                f"group {self.group_id}: sample indices {[r.sample_index for r in self.rollouts]} are not 0 … n-1"
            )

    def sample_id(self, sample_index: int) -> str:
        """Name of one member in errors, metrics and stored rows, e.g. ``"e0.addition-train-17/3"``."""
        return f"{self.group_id}/{sample_index}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingSample:
    """One document to train on, token-aligned.

    Prompt ``[5, 6]``, response ``[7, 1]``, advantage 2.0, sampler log-probabilities ``[-.3, -.1]``::

        input_ids        5    6    7    1
        response_mask    F    F    T    T
        advantages       0    0    2    2
        rollout_logprobs 0    0  -.3  -.1
    """

    sample_id: str
    input_ids: np.ndarray  # [L] int64
    response_mask: np.ndarray  # [L] bool: trained tokens
    advantages: np.ndarray  # [L] float32, 0 outside the mask
    rollout_logprobs: np.ndarray  # [L] float32, 0 outside the mask

    def __post_init__(self) -> None:
        length = len(self.input_ids)
        for name in ("response_mask", "advantages", "rollout_logprobs"):
            if getattr(self, name).shape != (length,):
                raise ValueError(f"sample {self.sample_id}: {name} {getattr(self, name).shape} is not [{length}]")
        if length < 2 or self.response_mask[0]:
            raise ValueError(f"sample {self.sample_id}: needs a prompt token before the first response token")

    @property
    def num_trained_tokens(self) -> int:
        return int(self.response_mask.sum())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """B packs of T tokens, label-aligned; documents never cross a row.

    The sample of `TrainingSample` followed by padding, T = 6::

        input_ids        5    6    7    1    0    0
        labels           6    7    1    0    0    0     (0 where there is no next token in the document)
        position_ids     0    1    2    3    0    1
        doc_ids          1    1    1    1    0    0     (0 = padding; a run of padding is a segment too)
        response_mask    F    T    T    F    F    F     (label t is a trained token)
        advantages       0    2    2    0    0    0
        rollout_logprobs 0  -.3  -.1    0    0    0
    """

    input_ids: torch.Tensor  # [B, T] int64
    labels: torch.Tensor  # [B, T] int64
    position_ids: torch.Tensor  # [B, T] int64, restart at 0 for each document
    doc_ids: torch.Tensor  # [B, T] int64, 1 … D in order, 0 = padding
    response_mask: torch.Tensor  # [B, T] bool
    advantages: torch.Tensor  # [B, T] float32
    rollout_logprobs: torch.Tensor  # [B, T] float32
    sample_ids: tuple[tuple[str, ...], ...]  # per row, the sample of doc id 1, 2, …
    old_logprobs: torch.Tensor | None = None  # [B, T] float32: proximal policy; None = the current one
    ref_logprobs: torch.Tensor | None = None  # [B, T] float32: frozen reference policy

    def __post_init__(self) -> None:
        shape = tuple(self.input_ids.shape)
        if len(shape) != 2 or len(self.sample_ids) != shape[0]:
            raise ValueError(f"PackedBatch: input_ids {shape} with sample ids of {len(self.sample_ids)} rows")
        dtypes = {
            "input_ids": "int64", "labels": "int64", "position_ids": "int64", "doc_ids": "int64",
            "response_mask": "bool", "advantages": "float32", "rollout_logprobs": "float32",
            "old_logprobs": "float32", "ref_logprobs": "float32",
        }  # fmt: skip
        for name, dtype in dtypes.items():
            tensor = getattr(self, name)
            if tensor is None:
                continue
            if tuple(tensor.shape) != shape or str(tensor.dtype) != f"torch.{dtype}":
                raise ValueError(
                    f"PackedBatch.{name}: {tuple(tensor.shape)} {tensor.dtype}, expected {shape} torch.{dtype}"
                )

    @property
    def num_rows(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def num_trained_tokens(self) -> int:
        return int(self.response_mask.sum())

    @property
    def num_real_tokens(self) -> int:
        """Tokens that are not padding."""
        return int((self.doc_ids > 0).sum())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Field name → tensor, for those present."""
        names = (
            "input_ids", "labels", "position_ids", "doc_ids", "response_mask",
            "advantages", "rollout_logprobs", "old_logprobs", "ref_logprobs",
        )  # fmt: skip
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same batch on another device; on a GPU without waiting for the work queued there."""
        if str(device).startswith("cuda"):
            moved = {name: t.pin_memory().to(device, non_blocking=True) for name, t in self.tensors().items()}
        else:
            moved = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return replace(self, **moved)

    def with_logprobs(self, *, old: torch.Tensor | None = None, ref: torch.Tensor | None = None) -> PackedBatch:
        """The same batch with proximal and/or reference log-probabilities attached."""
        return replace(
            self,
            old_logprobs=self.old_logprobs if old is None else old,
            ref_logprobs=self.ref_logprobs if ref is None else ref,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """A step's work, planned globally: every rank gets the same number of equally shaped micro-batches."""

    micro_batches: tuple[tuple[PackedBatch, ...], ...]  # [ranks][micro-batches]
    num_samples: int
    num_trained_tokens: int
    num_real_tokens: int
    num_padded_tokens: int

    def __post_init__(self) -> None:
        counts = {len(rank) for rank in self.micro_batches}
        if len(counts) > 1:
            raise ValueError(f"StepPlan: ranks have {[len(r) for r in self.micro_batches]} micro-batches")

    @property
    def padding_share(self) -> float:
        total = self.num_real_tokens + self.num_padded_tokens
        return self.num_padded_tokens / total if total else 0.0


class Reduction(StrEnum):
    """How a statistic is combined over micro-batches, ranks and groups."""

    MEAN = "mean"  # sum of totals / sum of weights
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    QUANTILE = "quantile"  # exact, over all values


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stat:
    """A mergeable statistic. `total` is the weighted sum, sum or extreme; `values` only for QUANTILE."""

    reduction: Reduction
    total: float = 0.0
    weight: float = 0.0  # number of observations (tokens, groups, …); 0 = nothing observed
    quantile: float = 0.5
    values: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))  # [n] float32

    @staticmethod
    def mean(total: float, weight: float) -> Stat:
        return Stat(reduction=Reduction.MEAN, total=float(total), weight=float(weight))

    @staticmethod
    def sum(total: float) -> Stat:
        return Stat(reduction=Reduction.SUM, total=float(total), weight=1.0)

    @staticmethod
    def max(value: float) -> Stat:
        return Stat(reduction=Reduction.MAX, total=float(value), weight=1.0)

    @staticmethod
    def min(value: float) -> Stat:
        return Stat(reduction=Reduction.MIN, total=float(value), weight=1.0)

    @staticmethod
    def of_quantile(values: np.ndarray, q: float) -> Stat:
        values = np.asarray(values, dtype=np.float32).ravel()
        return Stat(reduction=Reduction.QUANTILE, values=values, weight=float(values.size), quantile=q)

    def merge(self, other: Stat) -> Stat:
        if self.reduction is not other.reduction or self.quantile != other.quantile:
            raise ValueError(f"cannot merge a {self.reduction} statistic with a {other.reduction} one")
        if self.weight == 0 or other.weight == 0:
            return other if self.weight == 0 else self
        weight = self.weight + other.weight
        if self.reduction is Reduction.QUANTILE:
            return replace(self, weight=weight, values=np.concatenate([self.values, other.values]))
        combine = {Reduction.MAX: max, Reduction.MIN: min}.get(self.reduction, lambda a, b: a + b)
        return replace(self, weight=weight, total=combine(self.total, other.total))

    def value(self) -> float:
        """The number to report; NaN when nothing was observed."""
        if self.weight == 0:
            return float("nan")
        if self.reduction is Reduction.QUANTILE:
            return float(np.quantile(self.values, self.quantile))
        return self.total / self.weight if self.reduction is Reduction.MEAN else self.total


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Named mergeable statistics; names as in docs/metrics.md, e.g. ``"mismatch/k3"``."""

    stats: Mapping[str, Stat] = field(default_factory=dict)

    @staticmethod
    def merged(parts: Iterable[StepMetrics]) -> StepMetrics:
        """Combine micro-batches or ranks; a statistic absent from one part is taken from the others."""
        stats: dict[str, Stat] = {}
        for part in parts:
            for name, stat in part.stats.items():
                stats[name] = stats[name].merge(stat) if name in stats else stat
        return StepMetrics(stats=stats)

    def values(self) -> dict[str, float]:
        return {name: stat.value() for name, stat in self.stats.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightEntry:
    """One tensor as it goes over the wire: Hugging Face name, dtype name such as ``"float32"``, full shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """The tensors of a push in the order they are sent; taken from the very tensors that are sent."""

    entries: tuple[WeightEntry, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(entry.name for entry in self.entries)


class StateKind(StrEnum):
    """The tensors a trainer keeps for each parameter, all in fp32."""

    WEIGHT = "weight"  # the master copy that the optimiser updates
    GRADIENT = "gradient"  # accumulated and not clipped; exists between forward_backward and optim_step
    FIRST_MOMENT = "exp_avg"  # AdamW's
    SECOND_MOMENT = "exp_avg_sq"


TRAINING_STATE = (StateKind.WEIGHT, StateKind.FIRST_MOMENT, StateKind.SECOND_MOMENT)  # all that a step starts from


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bucket:
    """A bounded run of full, plain, contiguous tensors whose gather is complete on every rank."""

    tensors: tuple[tuple[str, torch.Tensor], ...]  # (Hugging Face name, tensor), in manifest order


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedTensor:
    """How one parameter is laid out: trainer name, Hugging Face name, global shape and elements held per rank."""

    trainer_name: str
    hf_name: str
    shape: tuple[int, ...]
    local_numel: tuple[int, ...]  # by rank
    checksum: int  # of the gathered tensor, see algo.checksum
    source_checksum: int  # of the same tensor in the source checkpoint, cast to the trainer's dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """What `shard_model` did and proved: the layout, and that gathering it again gives the source."""

    backend: str
    num_ranks: int
    dtype: str
    tensors: tuple[ShardedTensor, ...]
    checkpoint: str  # path of the sharded checkpoint
    tied_embeddings: bool
    barrier_s: float

    @property
    def mismatched(self) -> tuple[str, ...]:
        """Hugging Face names of tensors whose gathered bits differ from the source."""
        return tuple(t.hf_name for t in self.tensors if t.checksum != t.source_checksum)


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryResult:
    """Decode canary: the engine samples, the trainer scores the same tokens."""

    num_tokens: int
    max_abs: float  # nats
    mean_abs: float
    tolerance: float
    seconds: float

    @property
    def ok(self) -> bool:
        return self.num_tokens > 0 and self.max_abs <= self.tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderReport:
    """What rank 0 sent in one push, measured on the very tensors that went out."""

    policy_version: int  # the trainer's own
    checksums: Mapping[str, int]  # Hugging Face name → `NamedChecksums` of `algo.checksum`, in the order sent
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightReceipt:
    """What one engine worker received in one push, measured behind the wire and before the model fuses it."""

    checksums: Mapping[str, int]  # Hugging Face name → likewise
    num_bytes: int
    unloaded: tuple[str, ...]  # the worker's parameters that no received tensor reached


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """A file as it was written; the name is relative to the folder it belongs to."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncCertificate:
    """Evidence that every engine holds the trainer's weights of `policy_version`."""

    policy_version: int
    engine_versions: tuple[int, ...]
    num_tensors: int
    num_bytes: int
    transfer_s: float  # start of update to acknowledged finish, checksums included
    missing: tuple[str, ...]  # names the engine's checkpoint has and the trainer did not send
    unexpected: tuple[str, ...]  # the reverse
    unloaded: tuple[str, ...]  # engine parameters that no sent tensor reached
    mismatched: tuple[str, ...]  # names whose checksums differ between sender and an engine
    checksum: str  # sha256 over (name, checksum) of the sender
    canary: CanaryResult | None = None  # None when not due at this push

    @property
    def ok(self) -> bool:
        return (
            not (self.missing or self.unexpected or self.unloaded or self.mismatched)
            and all(version == self.policy_version for version in self.engine_versions)
            and (self.canary is None or self.canary.ok)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityCheck:
    """One decision: a value against its tolerance, with how much evidence stands behind it."""

    name: str
    verdict: ParityVerdict
    value: float
    tolerance: float
    num_observations: int
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityReport:
    """All checks of a comparison; FAIL beats INCONCLUSIVE beats PASS."""

    checks: tuple[ParityCheck, ...]
    tables: Mapping[str, Sequence[Mapping[str, object]]] = field(default_factory=dict)

    @property
    def verdict(self) -> ParityVerdict:
        verdicts = {check.verdict for check in self.checks}
        if ParityVerdict.FAIL in verdicts:
            return ParityVerdict.FAIL
        if ParityVerdict.INCONCLUSIVE in verdicts or not verdicts:
            return ParityVerdict.INCONCLUSIVE
        return ParityVerdict.PASS
