"""A step's rollouts as one Parquet table, one row per sample, exact to the bit.

The table is what replay, the parity probe and people read: what was asked, what was sampled with which
log-probabilities by which policy versions, how it was judged, and what it was worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from grpo_lib.algo.advantages import GroupAssessment
from grpo_lib.errors import StorageError
from grpo_lib.storage.refs import ArtifactStore, StoreRef
from grpo_lib.storage.tables import table_digest
from grpo_lib.types import (
    Completion,
    FinishReason,
    GroupStatus,
    Prompt,
    Rollout,
    RolloutGroup,
    Verdict,
    VerdictReason,
    VerdictState,
    VersionSpan,
)

FORMAT = "2"


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


def _list(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("item", kind, nullable=False))


SCHEMA = pa.schema(
    [
        _required("group_id", pa.string()),
        _required("sample_index", pa.int32()),
        _required("prompt_id", pa.string()),
        _required("dataset", pa.string()),
        _required("verifier", pa.string()),
        _required("answer", pa.string()),
        _required("prompt_text", pa.string()),
        _required("prompt_token_ids", _list(pa.int32())),
        _required("request_id", pa.string()),
        _required("token_ids", _list(pa.int32())),
        _required("logprobs", _list(pa.float32())),
        _required("span_versions", _list(pa.int64())),
        _required("span_stops", _list(pa.int64())),  # a span starts where the one before it stops
        _required("finish_reason", pa.string()),
        _required("seed", pa.int64()),
        _required("latency_s", pa.float64()),
        _required("text", pa.string()),
        _required("verdict_state", pa.string()),
        _required("verdict_reason", pa.string()),
        _required("reward", pa.float64()),
        pa.field("extracted", pa.string()),
        _required("verify_ms", pa.float64()),
        _required("group_status", pa.string()),
        _required("advantage", pa.float64()),
        _required("usable", pa.bool_()),
    ]
)
_TIMINGS = ("latency_s", "verify_ms")
_Row = dict[str, Any]  # by SCHEMA's names; lists are NumPy arrays


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredRollouts:
    """A step's groups as they were trained on, with an assessment each."""

    step: int
    groups: tuple[RolloutGroup, ...]
    assessments: tuple[GroupAssessment, ...]
    content_digest: str


def write_rollouts(
    store: ArtifactStore, *, step: int, groups: Sequence[RolloutGroup], assessments: Sequence[GroupAssessment]
) -> StoreRef:
    """Store the groups of a step.

    The reference is the hash of the file, timings included; `content_digest`, which leaves them out, is computed by
    those who ask for it.

    Raises:
        StorageError: the store cannot take them.
    """
    table = _table(groups, assessments)
    return store.put_table(table.replace_schema_metadata({"format": FORMAT, "step": str(step)}))


def read_rollouts(store: ArtifactStore, ref: StoreRef) -> StoredRollouts:
    """The groups that `write_rollouts` was given.

    Raises:
        StorageError: the file is missing or damaged, or is no rollout table of this format.
    """
    path = store.get(ref, verified=True)
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise StorageError(f"artifact {path} is not readable Parquet: {error}") from error
    metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    if metadata.get("format") != FORMAT or not table.schema.equals(SCHEMA):
        raise StorageError(f"artifact {path} is not a rollout table of format {FORMAT}")
    columns = {name: _values(table.column(name)) for name in SCHEMA.names}
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    by_group: dict[str, list[_Row]] = {}
    for row in rows:
        by_group.setdefault(row["group_id"], []).append(row)
    return StoredRollouts(
        step=int(metadata["step"]),
        groups=tuple(_group(members) for members in by_group.values()),
        assessments=tuple(_assessment(members) for members in by_group.values()),
        content_digest=table_digest(table, leave_out=_TIMINGS),
    )


def content_digest(groups: Sequence[RolloutGroup], assessments: Sequence[GroupAssessment]) -> str:
    """sha256 over everything but timings: equal for two runs that sampled and judged the same, bit for bit."""
    return table_digest(_table(groups, assessments), leave_out=_TIMINGS)


def _values(column: pa.ChunkedArray) -> list[Any]:
    """A column's values; lists as NumPy arrays, without a Python object per token."""
    if not pa.types.is_list(column.type):
        return column.to_pylist()
    return [
        chunk.values.to_numpy()[start:stop]
        for chunk in column.chunks
        for start, stop in pairwise(chunk.offsets.to_pylist())
    ]


def _table(groups: Sequence[RolloutGroup], assessments: Sequence[GroupAssessment]) -> pa.Table:
    if len(groups) != len(assessments) or len({group.group_id for group in groups}) != len(groups):
        raise ValueError(
            f"{len(groups)} rollout groups with {len({group.group_id for group in groups})} ids and "
            f"{len(assessments)} assessments; each group has its own"
        )
    members = [
        (group, rollout, assessment)
        for group, assessment in zip(groups, assessments, strict=True)
        for rollout in group.rollouts
    ]
    rows = [_row(*member) for member in members]
    lists = _lists([rollout.completion for _, rollout, _ in members], groups)
    columns = [
        lists[field.name] if field.name in lists else pa.array([row[field.name] for row in rows], field.type)
        for field in SCHEMA
    ]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def _lists(completions: Sequence[Completion], groups: Sequence[RolloutGroup]) -> dict[str, pa.ListArray]:
    """The columns of lists, without a Python object per token."""
    prompts = [ids for group in groups for ids in [np.array(group.prompt.token_ids, np.int64)] * len(group.rollouts)]
    spans = [completion.version_spans for completion in completions]
    columns = {
        "prompt_token_ids": prompts,
        "token_ids": [completion.token_ids for completion in completions],
        "logprobs": [completion.logprobs for completion in completions],
        "span_versions": [np.array([span.version for span in of_one], np.int64) for of_one in spans],
        "span_stops": [np.array([span.stop for span in of_one], np.int64) for of_one in spans],
    }
    return {name: _list_column(arrays, SCHEMA.field(name).type) for name, arrays in columns.items()}


def _list_column(arrays: Sequence[np.ndarray], kind: pa.ListType) -> pa.ListArray:
    """Rows one after the other in Arrow's pool, which is used again: fresh memory would cost as much as the copy.

    Raises:
        ValueError: a token id does not fit the column.
    """
    dtype = np.dtype(kind.value_type.to_pandas_dtype())
    if dtype == np.int32 and any(len(ids) and int(ids.max()) > np.iinfo(dtype).max for ids in arrays):
        raise ValueError(f"a token id of {max(int(ids.max()) for ids in arrays if len(ids))} does not fit {dtype}")
    stops = np.cumsum([0, *map(len, arrays)])
    buffer = pa.allocate_buffer(int(stops[-1]) * dtype.itemsize)
    if arrays:
        np.concatenate(arrays, out=np.frombuffer(buffer, dtype), casting="unsafe")
    values = pa.Array.from_buffers(kind.value_type, int(stops[-1]), [None, buffer])
    return pa.ListArray.from_arrays(pa.array(stops, pa.int32()), values, type=kind)


def _row(group: RolloutGroup, rollout: Rollout, assessment: GroupAssessment) -> _Row:
    """All of a sample but its lists."""
    prompt, completion, verdict = group.prompt, rollout.completion, rollout.verdict
    return {
        "group_id": group.group_id,
        "sample_index": rollout.sample_index,
        "prompt_id": prompt.prompt_id,
        "dataset": prompt.dataset,
        "verifier": prompt.verifier,
        "answer": prompt.answer,
        "prompt_text": prompt.text,
        "request_id": completion.request_id,
        "finish_reason": completion.finish_reason.value,
        "seed": completion.seed,
        "latency_s": float(completion.latency_s),
        "text": rollout.text,
        "verdict_state": verdict.state.value,
        "verdict_reason": verdict.reason.value,
        "reward": float(verdict.reward),
        "extracted": verdict.extracted,
        "verify_ms": float(verdict.elapsed_ms),
        "group_status": assessment.status.value,
        "advantage": float(assessment.advantages[rollout.sample_index]),
        "usable": bool(assessment.usable[rollout.sample_index]),
    }


def _group(rows: Sequence[_Row]) -> RolloutGroup:
    first = rows[0]
    return RolloutGroup(
        group_id=first["group_id"],
        prompt=Prompt(
            prompt_id=first["prompt_id"],
            text=first["prompt_text"],
            token_ids=tuple(first["prompt_token_ids"].tolist()),
            answer=first["answer"],
            dataset=first["dataset"],
            verifier=first["verifier"],
        ),
        rollouts=tuple(_rollout(row) for row in rows),
    )


def _rollout(row: _Row) -> Rollout:
    stops = row["span_stops"].tolist()
    spans = zip(row["span_versions"].tolist(), [0, *stops][: len(stops)], stops, strict=True)
    return Rollout(
        sample_index=row["sample_index"],
        completion=Completion(
            request_id=row["request_id"],
            token_ids=row["token_ids"].astype(np.int64),
            logprobs=row["logprobs"],
            version_spans=tuple(VersionSpan(version=version, start=start, stop=stop) for version, start, stop in spans),
            finish_reason=FinishReason(row["finish_reason"]),
            seed=row["seed"],
            latency_s=row["latency_s"],
        ),
        text=row["text"],
        verdict=Verdict(
            state=VerdictState(row["verdict_state"]),
            reward=row["reward"],
            reason=VerdictReason(row["verdict_reason"]),
            extracted=row["extracted"],
            elapsed_ms=row["verify_ms"],
        ),
    )


def _assessment(rows: Sequence[_Row]) -> GroupAssessment:
    return GroupAssessment(
        status=GroupStatus(rows[0]["group_status"]),
        advantages=np.array([row["advantage"] for row in rows], dtype=np.float64),
        usable=np.array([row["usable"] for row in rows], dtype=bool),
    )
