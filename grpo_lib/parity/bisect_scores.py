"""Two scorers of the same stored tokens: which document and position differ first, and which mistake explains it.

Everything is measured against an independent reference. A scorer is a suspect when it is farther from the reference
than the tolerance; the others show how much rounding to expect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from grpo_lib.algo.faults import Fault, Sight, faulty_batch
from grpo_lib.algo.packing import unpack_tokens
from grpo_lib.parity.bisect import Cause, Diagnosis, Finding, Reference, is_root_level, listed
from grpo_lib.parity.probe import ENGINE_DECODE
from grpo_lib.types import PackedBatch

EXPLAINED = 0.01  # share of the difference that a cause may leave over
_FLOOR_FACTOR = 3.0  # … or this multiple of what two right scorers differ by, where the difference itself is small
_NEAR_FLOOR = 0.1  # such a fit must still remove nine tenths of the difference
_MUCH_BETTER = 10.0  # a rival whose rest is this many times larger is none
_NEAREST_VERSIONS = 2  # of which single tensors are tried
_SHOWN_DOCUMENTS = 12
_SHOWN_HYPOTHESES = 12

Scores = Mapping[str, np.ndarray]  # sample id → [R] log-probabilities of its response


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a document lies in the packed rows."""

    sample_id: str
    micro_batch: int
    row: int
    doc_id: int  # 1 … D in its row
    start: int  # of its first response token's prediction, in the row

    def text(self, token: int) -> str:
        """E.g. ``"document 2 of row 0 of micro-batch 1 (e0.p3/1), response token 0, row position 17"``."""
        return (
            f"document {self.doc_id} of row {self.row} of micro-batch {self.micro_batch} ({self.sample_id}), "
            f"response token {token}, row position {self.start + token}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """One mistake, and what to say when it explains the suspect."""

    cause: Cause
    fault: Fault
    says: str  # completes "equals a plain forward …"
    where: str = ""
    edges: bool = (
        True  # False: the first and the last response token are open, two ways to shift treat them differently
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How near a hypothesis comes to the suspect on some documents."""

    hypothesis: Hypothesis
    rms: float
    max_abs: float
    share: float  # rms / rms of the suspect against the reference as configured, on the same tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A scorer that is off the reference."""

    name: str
    scores: Scores
    right: Scores  # the reference's
    places: Sequence[Place]  # of all documents, in pack order
    differing: Sequence[str]  # sample ids, in pack order
    first: str  # where the first token out of tolerance is
    floor: float  # rms between the reference and the nearest scorer within tolerance; 0 without one

    def fit(self, hypothesis: Hypothesis, predicted: Scores, ids: Sequence[str]) -> Fit:
        """Over the documents `ids`."""
        rms, largest = rms_and_max(self.scores, predicted, ids, edges=hypothesis.edges)
        raw, _ = rms_and_max(self.scores, self.right, ids, edges=hypothesis.edges)
        return Fit(hypothesis=hypothesis, rms=rms, max_abs=largest, share=rms / raw if raw else math.nan)

    def explained_by(self, fit: Fit) -> bool:
        """To within rounding: a hundredth of the difference, or what two right scorers differ by."""
        return fit.share <= EXPLAINED or (fit.rms <= _FLOOR_FACTOR * self.floor and fit.share <= _NEAR_FLOOR)

    def pattern(self) -> str:
        """Which documents differ."""
        count, total = len(self.differing), len(self.places)
        if count == total:
            return f"all {total} documents differ"
        others = {place.sample_id for place in self.places if place.doc_id > 1}
        if others and set(self.differing) == others:
            return f"{count} of {total} documents differ: all that are not first in their row"
        return f"{count} of {total} documents differ: {listed(self.differing)}"


def bisect_scores(
    scores: Mapping[str, Scores],
    batches: Sequence[PackedBatch],
    reference: Reference,
    *,
    tolerance: float,
    sampler: str = ENGINE_DECODE,
) -> Diagnosis:
    """Name what is wrong with every scorer that is off the reference.

    Args:
        scores: Scorer name → its log-probabilities of all documents in `batches`.
        batches: The documents packed as the trainers see them.
        tolerance: Largest difference of two right scorers, nats.
        sampler: Name of the scorer that holds what was stored when the tokens were drawn.
    """
    places = list(_places(batches))
    ids = [place.sample_id for place in places]
    right = predict(reference, batches, Fault())
    apart = {name: rms_and_max(values, right, ids) for name, values in scores.items()}
    floor = min((rms for rms, largest in apart.values() if largest <= tolerance), default=0.0)
    parts = []
    for name, (_, largest) in apart.items():
        if largest <= tolerance:  # False for NaN too
            continue
        first = [token for place in places if (token := _first_apart(place, scores[name], right, tolerance))]
        suspect = Suspect(
            name=name,
            scores=scores[name],
            right=right,
            places=places,
            differing=[place.sample_id for place, _ in first],
            first=first[0][0].text(first[0][1]),
            floor=floor,
        )
        parts.append(_explain(suspect, batches, reference, is_sampler=name == sampler))
    return Diagnosis.merged(parts)


def largest_apart(scores: Scores, batches: Sequence[PackedBatch], reference: Reference) -> float:
    """Largest difference from the reference as configured; NaN with a value that is not finite."""
    right = predict(reference, batches, Fault())
    return rms_and_max(scores, right, list(right))[1]


def usual_apart(scores: Scores, batches: Sequence[PackedBatch], reference: Reference) -> float:
    """95th percentile of a token's difference from the reference as configured."""
    right = predict(reference, batches, Fault())
    apart = np.concatenate([np.zeros(1), *(np.abs(_apart(scores, right, key)) for key in right)])
    return float(np.quantile(apart, 0.95))


def first_apart(
    scores: Scores, batches: Sequence[PackedBatch], reference: Reference, *, tolerance: float
) -> Place | None:
    """The first document in pack order that is off the reference as configured."""
    right = predict(reference, batches, Fault())
    return next((place for place in _places(batches) if _first_apart(place, scores, right, tolerance)), None)


def predict(reference: Reference, batches: Sequence[PackedBatch], fault: Fault) -> dict[str, np.ndarray]:
    """Sample id → [R] log-probabilities of the response under a fault."""
    found: dict[str, np.ndarray] = {}
    for batch in batches:
        found |= unpack_tokens(faulty_batch(batch, fault), reference.logprobs(batch, fault))
    return found


def rms_and_max(a: Scores, b: Scores, ids: Sequence[str], *, edges: bool = True) -> tuple[float, float]:
    """Root mean square and largest |a - b| over some documents; NaN with a non-finite value or without a token."""
    inner = slice(None) if edges else slice(1, -1)
    d = np.concatenate([np.zeros(0), *(_apart(a, b, key)[inner] for key in ids)])
    return (float(np.sqrt(np.mean(d**2))), float(np.abs(d).max())) if len(d) else (math.nan, math.nan)


def _apart(a: Scores, b: Scores, sample_id: str) -> np.ndarray:
    """[R] float64."""
    return np.subtract(a[sample_id], b[sample_id], dtype=np.float64)


def _explain(suspect: Suspect, batches: Sequence[PackedBatch], reference: Reference, *, is_sampler: bool) -> Diagnosis:
    """Try the mistakes that one can make; single tensors last, because each of them takes a forward."""
    everywhere = [place.sample_id for place in suspect.places]
    fits: list[tuple[Fit, Fit]] = []  # over all documents, and over those that differ
    finding = None
    for hypotheses in (_mistakes(reference, batches), _single_tensors(reference, batches)):
        for hypothesis, predicted in hypotheses(suspect):
            fits.append(
                (suspect.fit(hypothesis, predicted, everywhere), suspect.fit(hypothesis, predicted, suspect.differing))
            )
        finding = _best([fit for fit, _ in fits], suspect, "") or _best(
            [fit for _, fit in fits], suspect, f" in {len(suspect.differing)} of {len(everywhere)} documents"
        )
        if finding:
            break
    rows = [
        {
            "scorer": suspect.name,
            "hypothesis": fit.hypothesis.says,
            "rms": fit.rms,
            "max_abs": fit.max_abs,
            "unexplained": fit.share,
        }
        for fit, _ in sorted(fits, key=lambda pair: pair[0].share if math.isfinite(pair[0].share) else math.inf)
    ]
    tables = {"differences": _difference_rows(suspect), "hypotheses": rows[:_SHOWN_HYPOTHESES]}
    return Diagnosis(findings=(finding or _unfitted(suspect, fits, is_sampler=is_sampler),), tables=tables)


def _best(fits: Sequence[Fit], suspect: Suspect, scope: str) -> Finding | None:
    """The one mistake that explains the suspect; "unexplained" when several do; None when none does."""
    ordered = sorted((fit for fit in fits if suspect.explained_by(fit)), key=lambda fit: fit.share)
    if not ordered:
        return None
    best = ordered[0]
    rivals = [fit for fit in ordered[1:] if fit.share < _MUCH_BETTER * best.share]
    if rivals:
        names = "; ".join(fit.hypothesis.says for fit in (best, *rivals))
        return _unexplained(suspect, f"several mistakes explain it equally well: {names}")
    left = min((fit.share for fit in fits if fit is not best and math.isfinite(fit.share)), default=math.nan)
    return Finding(
        cause=best.hypothesis.cause,
        subject=suspect.name,
        where="; ".join(part for part in (best.hypothesis.where, f"first at {suspect.first}") if part),
        evidence=(
            f"equals a plain forward {best.hypothesis.says} within {best.max_abs:.2g} nats{scope}; as configured it is "
            f"{suspect_distance(suspect):.2g} away; {suspect.pattern()}; the next best explanation leaves {left:.0%}"
        ),
        unexplained=best.share,
    )


def suspect_distance(suspect: Suspect) -> float:
    """Largest difference from the reference as configured."""
    return rms_and_max(suspect.scores, suspect.right, suspect.differing)[1]


def _unfitted(suspect: Suspect, fits: Sequence[tuple[Fit, Fit]], *, is_sampler: bool) -> Finding:
    """A minority of documents off in the stored values only, or nothing that is known."""
    if is_sampler and 2 * len(suspect.differing) <= len(suspect.places):
        return Finding(
            cause=Cause.FOREIGN_ROLLOUTS,
            subject=suspect.name,
            where=listed(suspect.differing, most=20),
            evidence=(
                f"{len(suspect.differing)} of {len(suspect.places)} documents have stored log-probabilities up to "
                f"{suspect_distance(suspect):.2g} nats from a plain forward over the same tokens, the others agree"
            ),
        )
    best = min((fit for fit, _ in fits if math.isfinite(fit.share)), key=lambda fit: fit.share, default=None)
    nearest = f"the nearest, {best.hypothesis.says}, leaves {best.share:.0%}" if best else "none could be compared"
    return _unexplained(suspect, f"{len(fits)} known mistakes were tried; {nearest}")


def _unexplained(suspect: Suspect, why: str) -> Finding:
    return Finding(
        cause=Cause.UNEXPLAINED,
        subject=suspect.name,
        where=f"first at {suspect.first}",
        evidence=f"{suspect_distance(suspect):.2g} nats from a plain forward; {suspect.pattern()}; {why}",
    )


# -- hypotheses --------------------------------------------------------------------------------------------------------

_Tried = Callable[[Suspect], Iterator[tuple[Hypothesis, Scores]]]


def _mistakes(reference: Reference, batches: Sequence[PackedBatch]) -> _Tried:
    """Everything but single tensors, with what it predicts."""

    def tried(suspect: Suspect) -> Iterator[tuple[Hypothesis, Scores]]:
        for by, meaning in ((1, "the next token's"), (-1, "the token's before")):
            hypothesis = Hypothesis(
                cause=Cause.LABELS_SHIFTED,
                fault=Fault(),
                says=f"whose values are shifted: each token has {meaning} log-probability",
                edges=False,
            )
            yield hypothesis, {key: np.roll(values, -by) for key, values in suspect.right.items()}
        for hypothesis in (*_structural(batches), *_temperatures(reference), *_weights(reference)):
            yield hypothesis, predict(reference, batches, hypothesis.fault)

    return tried


def _structural(batches: Sequence[PackedBatch]) -> Iterator[Hypothesis]:
    sights = {Sight.ROW: "of a row", Sight.MICRO_BATCH: "of a micro-batch, rows joined,"}
    if all(batch.num_rows == 1 for batch in batches):
        del sights[Sight.MICRO_BATCH]  # the same as of a row
    for sight, whose in sights.items():
        yield Hypothesis(
            cause=Cause.BOUNDARIES_DROPPED,
            fault=Fault(sight=sight),
            says=f"in which the documents {whose} see each other while their positions restart",
        )
        yield Hypothesis(
            cause=Cause.POSITIONS_RUN_ON,
            fault=Fault(sight=sight, positions_restart=False),
            says=f"in which positions run on and the documents {whose} see each other: position ids do not restart at "
            "each document, or the boundaries that they follow from never reached the model",
        )
    for shift, what in ((1, "the token after the next"), (-1, "the token that it has just read")):
        yield Hypothesis(
            cause=Cause.LABELS_SHIFTED,
            fault=Fault(label_shift=shift),
            says=f"that scores {what} at each position (labels shifted by {shift:+d})",
            edges=False,
        )


def _temperatures(reference: Reference) -> Iterator[Hypothesis]:
    configured = reference.temperature
    if configured != 1:
        for wrong, how in ((1.0, "not applied"), (configured**2, "applied twice")):
            yield Hypothesis(
                cause=Cause.TEMPERATURE,
                fault=Fault(temperature=wrong),
                says=f"at temperature {wrong:g} instead of {configured:g}",
                where=f"temperature {configured:g} {how}",
            )


def _weights(reference: Reference) -> Iterator[Hypothesis]:
    root = tuple(name for name in reference.tensor_names if is_root_level(name))
    for version in _suspect_versions(reference):
        instead = f"version {version} instead of {reference.version}"
        yield Hypothesis(
            cause=Cause.STALE_WEIGHTS,
            fault=Fault(version=version),
            says=f"with the weights of {instead}",
            where=f"weights of {instead}",
        )
        if reference.tied_embedding:
            yield Hypothesis(
                cause=Cause.HEAD_UNTIED,
                fault=Fault(head_version=version),
                says=f"whose output head is the embedding of {instead}, while the embedding itself is right",
                where=f"output head, tied to {reference.tied_embedding}, holds it as of {instead}",
            )
        if len(root) > 1:
            yield Hypothesis(
                cause=Cause.STALE_TENSORS,
                fault=Fault(version=version, tensors=root),
                says=f"with all root-level tensors of {instead}",
                where=f"root-level tensors {', '.join(root)} of {instead}",
            )
    yield Hypothesis(
        cause=Cause.ROUNDED_WEIGHTS, fault=Fault(bf16_weights=True), says="with weights rounded to bfloat16"
    )


def _single_tensors(reference: Reference, batches: Sequence[PackedBatch]) -> _Tried:
    """Each tensor alone of the nearest other versions."""

    def tried(suspect: Suspect) -> Iterator[tuple[Hypothesis, Scores]]:
        del suspect
        for version in _suspect_versions(reference)[:_NEAREST_VERSIONS]:
            for name in reference.tensor_names:
                level = "root-level tensor" if is_root_level(name) else "tensor"
                hypothesis = Hypothesis(
                    cause=Cause.STALE_TENSORS,
                    fault=Fault(version=version, tensors=(name,)),
                    says=f"with {name} of version {version} instead of {reference.version}",
                    where=f"{level} {name} of version {version} instead of {reference.version}",
                )
                yield hypothesis, predict(reference, batches, hypothesis.fault)

    return tried


def _suspect_versions(reference: Reference) -> list[int]:
    """All versions but the right one, the nearest first."""
    others = (version for version in reference.versions if version != reference.version)
    return sorted(others, key=lambda version: abs(version - reference.version))


# -- places ------------------------------------------------------------------------------------------------------------


def _places(batches: Sequence[PackedBatch]) -> Iterator[Place]:
    for index, batch in enumerate(batches):
        for row, sample_ids in enumerate(batch.sample_ids):
            for doc_id, sample_id in enumerate(sample_ids, start=1):
                trained = torch.nonzero(batch.response_mask[row] & (batch.doc_ids[row] == doc_id))[:, 0]
                start = int(trained[0]) if len(trained) else 0
                yield Place(sample_id=sample_id, micro_batch=index, row=row, doc_id=doc_id, start=start)


def _first_apart(place: Place, a: Scores, b: Scores, tolerance: float) -> tuple[Place, int] | None:
    """The first response token out of tolerance, NaN included."""
    within = np.abs(_apart(a, b, place.sample_id)) <= tolerance
    return None if within.all() else (place, int(np.argmin(within)))


def _difference_rows(suspect: Suspect) -> list[dict[str, object]]:
    """The first documents that differ, in pack order."""
    rows = []
    shown = set(suspect.differing[:_SHOWN_DOCUMENTS])
    for place in suspect.places:
        if place.sample_id in shown:
            a, b = suspect.scores[place.sample_id], suspect.right[place.sample_id]
            apart = np.abs(_apart(suspect.scores, suspect.right, place.sample_id))
            worst = int(np.nan_to_num(apart, nan=np.inf).argmax())
            rows.append(
                {
                    "scorer": suspect.name,
                    "document": place.sample_id,
                    "micro_batch": place.micro_batch,
                    "row": place.row,
                    "doc_id": place.doc_id,
                    "worst_response_token": worst,
                    "value": float(a[worst]),
                    "reference": float(b[worst]),
                }
            )
    return rows
