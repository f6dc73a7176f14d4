"""Documents into rows of fixed length, and a step into equal work for every rank.

Rows are filled best-fit decreasing: the longest document goes first, into the fullest row that still holds it. A new
row opens only when no other has room, so at most one row is at most half full. Documents then return to their input
order inside each row, and rows to the order of their first documents. Nothing is lost, split or reordered.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from grpo_lib.types import PackedBatch, StepPlan, TrainingSample

if TYPE_CHECKING:
    import torch

_PLANNED_STEPS = 64  # steps that `packing_plan` packs to state its expectation


def pack(samples: Sequence[TrainingSample], pack_length: int) -> PackedBatch:
    """All samples in as few rows of `pack_length` tokens as best-fit finds.

    Raises:
        ValueError: no samples, a duplicate id, or a sample longer than a row.
    """
    _check_samples(samples, pack_length)
    return _packed_batch(samples, fit_rows([len(s.input_ids) for s in samples], pack_length), pack_length)


def plan_step(
    samples: Sequence[TrainingSample], *, num_ranks: int, pack_length: int, micro_batch_packs: int
) -> StepPlan:
    """The whole step's work for all ranks, planned in one place.

    Ranks that plan for themselves drop different numbers of groups, get different numbers of micro-batches and wait
    for each other forever (verl 5228). Here every rank gets the same number of micro-batches of the same shape, filled
    up with rows of padding, and the fullest remaining row always goes to the rank with the fewest tokens.

    Args:
        micro_batch_packs: Most rows of a micro-batch. A rank's rows are spread evenly over the fewest micro-batches, so
            less than one row per micro-batch is added to what its share needs.
    """
    if num_ranks < 1 or micro_batch_packs < 1:
        raise ValueError(f"num_ranks ({num_ranks}) and micro_batch_packs ({micro_batch_packs}) must be at least 1")
    _check_samples(samples, pack_length)
    lengths = [len(sample.input_ids) for sample in samples]
    rows = fit_rows(lengths, pack_length)
    num_micro_batches, width = _micro_batch_shape(len(rows), num_ranks, micro_batch_packs)
    rows_per_rank = num_micro_batches * width
    micro_batches = []
    for rank_rows in _balance(rows, lengths, num_ranks, rows_per_rank):
        rank_rows += [[] for _ in range(rows_per_rank - len(rank_rows))]
        starts = range(0, rows_per_rank, width)
        micro_batches.append(tuple(_packed_batch(samples, rank_rows[i : i + width], pack_length) for i in starts))
    return StepPlan(
        micro_batches=tuple(micro_batches),
        num_samples=len(samples),
        num_trained_tokens=sum(sample.num_trained_tokens for sample in samples),
        num_real_tokens=sum(lengths),
        num_padded_tokens=num_ranks * rows_per_rank * pack_length - sum(lengths),
    )


def unpack_tokens(batch: PackedBatch, values: torch.Tensor) -> dict[str, np.ndarray]:
    """Sample id → the values [B, T] at its trained tokens, in token order; the inverse of `pack` for one field."""
    assert values.shape == batch.response_mask.shape, (values.shape, batch.response_mask.shape)
    values_np, mask, doc_ids = (t.detach().cpu().numpy() for t in (values, batch.response_mask, batch.doc_ids))
    return {
        sample_id: values_np[row][mask[row] & (doc_ids[row] == doc_id)]
        for row, sample_ids in enumerate(batch.sample_ids)
        for doc_id, sample_id in enumerate(sample_ids, start=1)
    }


def fit_rows(lengths: Sequence[int], pack_length: int) -> list[list[int]]:
    """Indices of documents by row, best-fit decreasing; every length must fit a row."""
    rows: list[list[int]] = []
    space: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect_left(space, (lengths[index], 0))
        left, row = space.pop(at) if at < len(space) else (pack_length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        insort(space, (left - lengths[index], row))
    return sorted(sorted(row) for row in rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingPlan:
    """What packing will cost, known before the first rollout.

    Expected figures are for responses that all use their whole budget; the `max_` bounds hold for responses of any
    length from one token on. Both are for a step whose samples are all trained.
    """

    pack_length: int
    num_samples: int  # documents of a step
    longest_sample: int  # tokens: longest prompt and a full response
    expected_packs_per_rank: float
    expected_padding_share: float
    max_packs_per_rank: int
    max_padding_share: float


def packing_plan(
    prompt_lengths: Sequence[int],
    *,
    max_response: int,
    pack_length: int,
    num_ranks: int,
    group_size: int,
    prompts_per_step: int,
    micro_batch_packs: int = 1,
) -> PackingPlan:
    """Packs and padding of a step over prompts of these lengths.

    The expectation packs up to 64 steps, spread evenly over the prompts in their order.

    Raises:
        ValueError: no prompts, or the longest prompt with a full response does not fit a pack.
    """
    if not prompt_lengths:
        raise ValueError("no prompts to plan packs for")
    longest = max(prompt_lengths) + max_response
    if longest > pack_length:
        raise ValueError(
            f"longest prompt ({max(prompt_lengths)}) + rollout.max_tokens ({max_response}) = {longest} exceeds "
            f"trainer.pack_length ({pack_length}); raise pack_length or lower max_tokens or data.max_prompt_tokens"
        )

    def padded(num_rows: int) -> int:
        return num_ranks * math.prod(_micro_batch_shape(num_rows, num_ranks, micro_batch_packs))

    padded_rows, real_tokens = [], []
    for lengths in _full_steps(prompt_lengths, max_response, group_size, prompts_per_step):
        padded_rows.append(padded(len(fit_rows(lengths, pack_length))))
        real_tokens.append(sum(lengths))
    num_samples = group_size * prompts_per_step
    # A row opens only when no row can hold the document, so every earlier one holds at least this many.
    max_rows = _ceil_div(num_samples, pack_length // longest)
    return PackingPlan(
        pack_length=pack_length,
        num_samples=num_samples,
        longest_sample=longest,
        expected_packs_per_rank=float(np.mean(padded_rows)) / num_ranks,
        expected_padding_share=1 - sum(real_tokens) / (sum(padded_rows) * pack_length),
        max_packs_per_rank=max(padded(rows) for rows in range(1, max_rows + 1)) // num_ranks,
        max_padding_share=max(
            1 - _fewest_tokens(rows, num_samples * (min(prompt_lengths) + 1), longest, pack_length)
            / (padded(rows) * pack_length)
            for rows in range(1, max_rows + 1)
        ),
    )  # fmt: skip


def _micro_batch_shape(num_rows: int, num_ranks: int, micro_batch_packs: int) -> tuple[int, int]:
    """(micro-batches per rank, rows of each)."""
    per_rank = _ceil_div(num_rows, num_ranks)
    num_micro_batches = _ceil_div(per_rank, micro_batch_packs)
    return num_micro_batches, _ceil_div(per_rank, num_micro_batches)


def _full_steps(
    prompt_lengths: Sequence[int], max_response: int, group_size: int, prompts_per_step: int
) -> list[list[int]]:
    """Document lengths of steps whose responses are all full; the prompts wrap around when a step needs more."""
    num_steps = min(_PLANNED_STEPS, max(1, len(prompt_lengths) // prompts_per_step))
    starts = np.linspace(0, max(0, len(prompt_lengths) - prompts_per_step), num_steps).astype(int)
    return [
        [
            prompt_lengths[(start + offset) % len(prompt_lengths)] + max_response
            for offset in range(prompts_per_step)
            for _ in range(group_size)
        ]
        for start in starts.tolist()
    ]


def _fewest_tokens(num_rows: int, fewest: int, longest: int, pack_length: int) -> int:
    """Least real tokens in so many rows: all but one are over half full, and over `pack_length - longest`."""
    return max(fewest, (num_rows - 1) * max(pack_length // 2 + 1, pack_length - longest + 1))


def _balance(
    rows: Sequence[list[int]], lengths: Sequence[int], num_ranks: int, rows_per_rank: int
) -> list[list[list[int]]]:
    """Rows by rank: fullest row first, to the rank with the fewest tokens that has a place left."""
    by_rank: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for row in sorted(rows, key=lambda row: -sum(lengths[i] for i in row)):
        open_ranks = [rank for rank in range(num_ranks) if len(by_rank[rank]) < rows_per_rank]
        rank = min(open_ranks, key=loads.__getitem__)
        by_rank[rank].append(row)
        loads[rank] += sum(lengths[i] for i in row)
    return [sorted(rank_rows) for rank_rows in by_rank]


def _packed_batch(samples: Sequence[TrainingSample], rows: Sequence[Sequence[int]], pack_length: int) -> PackedBatch:
    """Rows of sample indices as tensors; an empty row is all padding.

    The one label shift of the project is here: entry t of a target field describes token t + 1 of the document, so the
    first response token is predicted at the last prompt token, and the last token of a document predicts nothing.
    """
    import torch  # only where tensors are made: `grpo validate` plans packs without loading it

    shape = (len(rows), pack_length)
    input_ids, doc_ids, labels = (np.zeros(shape, np.int64) for _ in range(3))
    response_mask = np.zeros(shape, np.bool_)
    advantages, rollout_logprobs = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    position_ids = np.empty(shape, np.int64)
    for row, indices in enumerate(rows):
        start = 0
        for doc_id, index in enumerate(indices, start=1):
            sample = samples[index]
            stop = start + len(sample.input_ids)
            input_ids[row, start:stop] = sample.input_ids
            doc_ids[row, start:stop] = doc_id
            position_ids[row, start:stop] = np.arange(stop - start)
            for packed, tokens in (
                (labels, sample.input_ids),
                (response_mask, sample.response_mask),
                (advantages, sample.advantages),
                (rollout_logprobs, sample.rollout_logprobs),
            ):
                packed[row, start : stop - 1] = tokens[1:]
            start = stop
        position_ids[row, start:] = np.arange(pack_length - start)
    return PackedBatch(
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(labels),
        position_ids=torch.from_numpy(position_ids),
        doc_ids=torch.from_numpy(doc_ids),
        response_mask=torch.from_numpy(response_mask),
        advantages=torch.from_numpy(advantages),
        rollout_logprobs=torch.from_numpy(rollout_logprobs),
        sample_ids=tuple(tuple(samples[index].sample_id for index in indices) for indices in rows),
    )


def _check_samples(samples: Sequence[TrainingSample], pack_length: int) -> None:
    if not samples:
        raise ValueError("no samples to pack; a step without trainable tokens is not trained")
    too_long = [(s.sample_id, len(s.input_ids)) for s in samples if len(s.input_ids) > pack_length]
    if too_long:
        raise ValueError(
            f"samples longer than a pack of {pack_length} tokens: {too_long[:3]} and {max(0, len(too_long) - 3)} more; "
            "raise trainer.pack_length, or lower data.max_prompt_tokens or rollout.max_tokens"
        )
    ids = [sample.sample_id for sample in samples]
    if len(set(ids)) != len(ids):
        duplicates = sorted({sample_id for sample_id in ids if ids.count(sample_id) > 1})
        raise ValueError(f"sample ids {duplicates[:3]} occur twice; ids name one visit of one prompt")


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
