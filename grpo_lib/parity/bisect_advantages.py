"""Which advantage was each document trained with? A gradient is linear in them, so it can be asked.

On policy the loss of a document is its advantage times a function of the weights, so the step's gradient is the sum of
advantage × that document's gradient at advantage 1. Least squares over the documents' gradients from the reference
gives the advantages back, with their standard errors, and shows by what is left over whether the gradient is such a sum
at all. Only a sample of the elements of each tensor is kept: the relation holds for every one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import torch

from grpo_lib.algo.faults import Fault
from grpo_lib.interfaces import PolicyLoss
from grpo_lib.parity.bisect import Cause, Diagnosis, Finding, Reference, listed
from grpo_lib.types import PackedBatch, StepPlan

_ELEMENTS_PER_UNIT = 8  # rows of the least squares for each unknown
_MIN_ELEMENTS = 8192
_IS_SUM = 1e-3  # relative rest of a gradient that is a sum of the documents' gradients
_EXPLAINED = 0.02  # share of the difference of advantages that a cause may leave over
_SIGMAS = 8.0
_ROUNDING = 1e-3  # of the largest advantage: fp32 gradients give advantages back to 1e-4, and no mistake is so small
_SEED = 20_240  # of the sample of elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One trained document."""

    sample_id: str
    advantage: float
    rank: int
    micro_batch: int  # counted over all ranks
    num_tokens: int  # trained ones

    @property
    def group(self) -> str:
        return self.sample_id.rsplit("/", 1)[0]

    @property
    def index(self) -> int:
        """In its group."""
        return int(self.sample_id.rsplit("/", 1)[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Documents with the same tokens: only the sum of their advantages shows in a gradient."""

    members: tuple[Member, ...]
    batch: PackedBatch  # the first of them alone, with advantage 1

    def total(self, of: Mapping[str, float]) -> float:
        """Sum over the members of a value by sample id."""
        return sum(of[member.sample_id] for member in self.members)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recovered:
    """Advantages that a gradient was made with."""

    units: tuple[Unit, ...]
    values: np.ndarray  # [units] float64, sums over members
    errors: np.ndarray  # [units] standard errors
    rest: float  # share of the gradient that no set of advantages gives

    @property
    def true(self) -> np.ndarray:
        """[units] what the values should be."""
        return np.array([sum(member.advantage for member in unit.members) for unit in self.units])

    @property
    def off(self) -> np.ndarray:
        """[units] bool: whether a value is not the true one, beyond its error, the usual one, and rounding."""
        noise = _SIGMAS * np.maximum(self.errors, np.median(self.errors))
        return np.abs(self.values - self.true) > np.maximum(noise, _ROUNDING * np.abs(self.true).max())

    @property
    def members(self) -> list[Member]:
        return [member for unit in self.units for member in unit.members]


def explain_gradient(
    name: str,
    gradient: Callable[[str], torch.Tensor],
    plan: StepPlan,
    reference: Reference,
    loss: PolicyLoss,
    *,
    batches: Sequence[PackedBatch],
    loss_denominator: float,
) -> Diagnosis:
    """Name the denominator or the advantages that the gradient was made with; no finding where it is no such sum.

    Args:
        name: The trainer's.
        gradient: Its gradient by tensor name.
        plan: Who trained which document.
        batches: The plan's micro-batches in order, as the loss takes them.
    """
    units = _units(plan, batches)
    recovered = recover(units, gradient, reference, loss, loss_denominator=loss_denominator)
    tables = {"advantages": _rows(name, recovered)}
    if not recovered.off.any() or recovered.rest > _IS_SUM:
        return Diagnosis(tables=tables)
    return Diagnosis(findings=(_best(name, recovered, plan) or _changed(name, recovered),), tables=tables)


def recover(
    units: Sequence[Unit],
    gradient: Callable[[str], torch.Tensor],
    reference: Reference,
    loss: PolicyLoss,
    *,
    loss_denominator: float,
) -> Recovered:
    """Least squares in float64 on a sample of elements; memory is elements × units."""
    per_tensor = -(-max(_MIN_ELEMENTS, _ELEMENTS_PER_UNIT * len(units)) // len(reference.tensor_names))
    generator = torch.Generator().manual_seed(_SEED)
    picked: dict[str, torch.Tensor] = {}

    def sample(read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        parts = []
        for tensor_name in reference.tensor_names:
            flat = read(tensor_name).flatten()
            if tensor_name not in picked:
                picked[tensor_name] = torch.randperm(flat.numel(), generator=generator)[:per_tensor]
            parts.append(flat[picked[tensor_name]].double())
        return torch.cat(parts)

    target = sample(gradient)
    columns = torch.stack(
        [
            sample(reference.gradient([unit.batch], loss, loss_denominator=loss_denominator, fault=Fault()).__getitem__)
            for unit in units
        ],
        dim=1,
    )
    scale = columns.norm(dim=0).clamp_min(torch.finfo(torch.float64).tiny)
    solved = torch.linalg.lstsq(columns / scale, target[:, None], rcond=1e-9, driver="gelsd").solution[:, 0]
    left = target - (columns / scale) @ solved
    variance = float(left.square().sum()) / max(1, len(target) - len(units))
    covariance = torch.linalg.pinv((columns / scale).T @ (columns / scale), hermitian=True) * variance
    return Recovered(
        units=tuple(units),
        values=(solved / scale).numpy(),
        errors=(covariance.diagonal().clamp_min(0).sqrt() / scale).numpy(),
        rest=float(left.norm() / target.norm()) if target.any() else math.nan,
    )


def _units(plan: StepPlan, batches: Sequence[PackedBatch]) -> list[Unit]:
    """Documents by their tokens, in pack order."""
    ranks = [rank for rank, own in enumerate(plan.micro_batches) for _ in own]
    members: dict[bytes, list[Member]] = {}
    alone: dict[bytes, PackedBatch] = {}
    for index, (rank, batch) in enumerate(zip(ranks, batches, strict=True)):
        for row, sample_ids in enumerate(batch.sample_ids):
            for doc_id, sample_id in enumerate(sample_ids, start=1):
                single = _alone(batch, row, doc_id)
                mask = single.response_mask
                # Equal tokens sampled by different weights have different importance weights.
                weights = (single.rollout_logprobs[mask] * 1e3).round().numpy().tobytes()
                key = single.input_ids.numpy().tobytes() + mask.numpy().tobytes() + weights
                advantages = single.advantages[mask]
                members.setdefault(key, []).append(
                    Member(
                        sample_id=sample_id,
                        advantage=float(advantages[0]) if len(advantages) else 0.0,
                        rank=rank,
                        micro_batch=index,
                        num_tokens=int(mask.sum()),
                    )
                )
                alone.setdefault(key, replace(single, advantages=mask.float()))
    return [Unit(members=tuple(found), batch=alone[key]) for key, found in members.items()]


def _alone(batch: PackedBatch, row: int, doc_id: int) -> PackedBatch:
    """One document as a batch of one row."""
    places = batch.doc_ids[row] == doc_id
    tensors = {name: tensor[row][places][None] for name, tensor in batch.tensors().items()}
    tensors["doc_ids"] = torch.ones_like(tensors["doc_ids"])
    return replace(batch, sample_ids=((batch.sample_ids[row][doc_id - 1],),), **tensors)


# -- explanations ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Explanation:
    cause: Cause
    where: str
    says: str
    advantages: Mapping[str, float]  # sample id → what it was trained with


def _best(name: str, recovered: Recovered, plan: StepPlan) -> Finding | None:
    """The only explanation that gives the recovered values."""
    raw = float(np.linalg.norm(recovered.values - recovered.true))
    fits = []
    for explanation in (*_denominators(recovered.members), *_swaps(recovered)):
        predicted = np.array([unit.total(explanation.advantages) for unit in recovered.units])
        fits.append((float(np.linalg.norm(recovered.values - predicted)) / raw, explanation))
    fits.sort(key=lambda fit: fit[0])
    if not fits or fits[0][0] > _EXPLAINED or (len(fits) > 1 and fits[1][0] <= _EXPLAINED):
        return None
    share, explanation = fits[0]
    following = f"; the next best explanation leaves {fits[1][0]:.0%}" if len(fits) > 1 else ""
    return Finding(
        cause=explanation.cause,
        subject=name,
        where=explanation.where,
        evidence=(
            f"the advantages recovered from its gradient are {explanation.says}, all but {share:.1g} of the "
            f"difference{following}; {_rest(recovered)}"
        ),
        unexplained=share,
    )


def _denominators(members: Sequence[Member]) -> Iterator[_Explanation]:
    """Sums divided by the tokens of a part of the step instead of the whole's."""
    total = sum(member.num_tokens for member in members)
    parts: Mapping[str, Callable[[Member], object]] = {
        "rank": lambda member: member.rank,
        "micro-batch": lambda member: member.micro_batch,
        "document": lambda member: member.sample_id,
    }
    seen: set[tuple[int, ...]] = set()
    for part, key in parts.items():
        tokens: dict[object, int] = {}
        for member in members:
            tokens[key(member)] = tokens.get(key(member), 0) + member.num_tokens
        split = tuple(tokens[key(member)] for member in members)
        if len(tokens) < 2 or split in seen:  # one part is the whole; equal splits are one hypothesis
            continue
        seen.add(split)
        for divisor, how in ((1, "summed"), (len(tokens), "averaged")):
            factor = {value: total / count / divisor for value, count in tokens.items()}
            examples = ", ".join(f"{part} {value}: x {factor[value]:.4g}" for value in list(factor)[:4])
            yield _Explanation(
                cause=Cause.LOSS_DENOMINATOR,
                where=f"loss divided by the tokens of each {part} ({len(tokens)} of them), {how}",
                says=f"the true ones times {total} / tokens of the {part} ({examples})",
                advantages={member.sample_id: member.advantage * factor[key(member)] for member in members},
            )


def _swaps(recovered: Recovered) -> Iterator[_Explanation]:
    """Two groups with each other's advantages, member by member."""
    by_group: dict[str, list[Member]] = {}
    for member in sorted(recovered.members, key=lambda member: member.index):
        by_group.setdefault(member.group, []).append(member)
    true = {member.sample_id: member.advantage for member in recovered.members}
    for one, other in combinations(sorted(_groups_off(recovered)), 2):
        if len(by_group[one]) != len(by_group[other]):
            continue
        pairs = list(zip(by_group[one], by_group[other], strict=True))
        swapped = {a.sample_id: b.advantage for a, b in pairs} | {b.sample_id: a.advantage for a, b in pairs}
        yield _Explanation(
            cause=Cause.ADVANTAGES_SWAPPED,
            where=f"groups {one} and {other}",
            says=f"those of {one} in {other} and the reverse",
            advantages={**true, **swapped},
        )


def _groups_off(recovered: Recovered) -> set[str]:
    return {
        member.group
        for unit, is_off in zip(recovered.units, recovered.off, strict=True)
        if is_off
        for member in unit.members
    }


def _changed(name: str, recovered: Recovered) -> Finding:
    """Documents with other advantages than theirs, and how, where one factor says it."""
    off = recovered.off
    documents = [
        member.sample_id for unit, is_off in zip(recovered.units, off, strict=True) if is_off for member in unit.members
    ]
    true, found = recovered.true[off], recovered.values[off]
    factor = float(true @ found / (true @ true)) if true.any() else math.nan
    left = float(np.linalg.norm(found - factor * true) / np.linalg.norm(found - true))
    how = (
        f"the true ones times {round(factor, 6) + 0.0:.4g}"
        if left <= _EXPLAINED
        else "no common multiple of the true ones"
    )
    return Finding(
        cause=Cause.ADVANTAGES_CHANGED,
        subject=name,
        where=f"{len(documents)} documents: {listed(documents)}",
        evidence=(
            f"the advantages recovered from its gradient for them are {how}, largest difference "
            f"{np.abs(found - true).max():.3g}; the others are right; {_rest(recovered)}"
        ),
    )


def _rest(recovered: Recovered) -> str:
    return f"{recovered.rest:.1g} of the gradient is no sum of the documents' gradients"


def _rows(name: str, recovered: Recovered) -> list[dict[str, object]]:
    columns = (recovered.units, recovered.true, recovered.values, recovered.errors, recovered.off)
    return [
        {
            "trainer": name,
            "documents": listed([member.sample_id for member in unit.members], most=4),
            "advantage": float(true),
            "trained_with": float(value),
            "standard_error": float(error),
        }
        for unit, true, value, error, is_off in zip(*columns, strict=True)
        if is_off
    ]
