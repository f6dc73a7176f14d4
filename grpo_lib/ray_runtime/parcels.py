"""What crosses processes every step, as one numpy array per field instead of one object per item.

Ray moves numpy arrays without copying them, but pickles tensors and dataclasses one by one: a step has a hundred small
tensors on the way out and hundreds of completions on the way back. A parcel unpickles as what was put into it, so that
neither side knows of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from grpo_lib.types import Completion, FinishReason, PackedBatch, VersionSpan


class BatchParcel:
    """Equally shaped micro-batches; unpickles as ``tuple[PackedBatch, ...]``."""

    def __init__(self, micro_batches: Sequence[PackedBatch]) -> None:
        self._micro_batches = tuple(micro_batches)

    def __reduce__(self) -> tuple[object, ...]:
        batches = self._micro_batches
        names = tuple(batches[0].tensors()) if batches else ()
        fields = {name: np.stack([batch.tensors()[name].numpy() for batch in batches]) for name in names}
        return _batches, (fields, tuple(batch.sample_ids for batch in batches))


class CompletionParcel:
    """Completions; unpickles as ``list[Completion]``."""

    def __init__(self, completions: Sequence[Completion]) -> None:
        self._completions = tuple(completions)

    def __reduce__(self) -> tuple[object, ...]:
        completions = self._completions
        return _completions, (
            tuple(c.request_id for c in completions),
            np.array([len(c.token_ids) for c in completions], np.int64),
            np.concatenate([np.zeros(0, np.int64), *(c.token_ids for c in completions)]),
            np.concatenate([np.zeros(0, np.float32), *(c.logprobs for c in completions)]),
            np.array([len(c.version_spans) for c in completions], np.int64),
            np.array([(s.version, s.start, s.stop) for c in completions for s in c.version_spans], np.int64),
            tuple(c.finish_reason.value for c in completions),
            tuple(c.seed for c in completions),
            np.array([c.latency_s for c in completions], np.float64),
        )


def _batches(fields: dict[str, np.ndarray], sample_ids: tuple[tuple[tuple[str, ...], ...], ...]) -> object:
    # Copied: what Ray maps into a process is read-only.
    tensors = {name: torch.from_numpy(stacked.copy()).unbind() for name, stacked in fields.items()}
    return tuple(
        PackedBatch(sample_ids=ids, **{name: rows[index] for name, rows in tensors.items()})
        for index, ids in enumerate(sample_ids)
    )


def _completions(
    request_ids: tuple[str, ...],
    lengths: np.ndarray,
    token_ids: np.ndarray,
    logprobs: np.ndarray,
    span_counts: np.ndarray,
    spans: np.ndarray,
    reasons: tuple[str, ...],
    seeds: tuple[int, ...],
    latencies_s: np.ndarray,
) -> list[Completion]:
    token_ids, logprobs = token_ids.copy(), logprobs.copy()  # read-only otherwise, see above
    stops, span_stops = np.cumsum(lengths).tolist(), np.cumsum(span_counts).tolist()
    all_spans = [VersionSpan(version=version, start=start, stop=stop) for version, start, stop in spans.tolist()]
    completions: list[Completion] = []
    start = span_start = 0
    for index, request_id in enumerate(request_ids):
        stop, span_stop = stops[index], span_stops[index]
        completions.append(
            Completion(
                request_id=request_id,
                token_ids=token_ids[start:stop],
                logprobs=logprobs[start:stop],
                version_spans=tuple(all_spans[span_start:span_stop]),
                finish_reason=FinishReason(reasons[index]),
                seed=seeds[index],
                latency_s=float(latencies_s[index]),
            )
        )
        start, span_start = stop, span_stop
    return completions
