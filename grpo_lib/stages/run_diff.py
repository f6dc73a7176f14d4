"""What differs between two stored runs, and where they part first. Nothing is run again; what is equal is not said."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_lib.config import flat
from grpo_lib.errors import DataError
from grpo_lib.stages.lineage import flattened
from grpo_lib.stages.stored_run import StoredRun

_MEASURED = ("time/", "throughput/")  # metrics of the machine and the moment
_ABSENT = "–"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that two runs do not have in common."""

    section: str  # settings, origin, data, rollouts, weights, metrics or evaluation
    what: str
    a: str
    b: str


def run(a: StoredRun, b: StoredRun) -> tuple[Difference, ...]:
    """Everything that differs, causes before effects.

    A record that one run has and the other lacks is a difference; one that both lack is not.
    """
    return (
        *_differing("settings", flat(a.config), flat(b.config)),
        *_differing("origin", flattened(a.lineage), flattened(b.lineage)),
        *_differing("data", _data(a), _data(b)),
        *_first_apart("rollouts", "content of step", _rollouts(a), _rollouts(b)),
        *_first_apart("weights", "checksum of version", _weights(a), _weights(b)),
        *_metrics(_rows(a), _rows(b)),
        *_differing("evaluation", _evaluation(a), _evaluation(b)),
    )


def computed_metrics(row: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a metrics row that a repetition must give again: all but times and rates."""
    return {name: value for name, value in row.items() if not name.startswith(_MEASURED)}


def _differing(section: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    for name in [*a, *(name for name in b if name not in a)]:
        if name not in a or name not in b or a[name] != b[name]:
            yield Difference(section=section, what=name, a=_text(a, name), b=_text(b, name))


def _text(values: Mapping[str, Any], name: str) -> str:
    return str(values[name]) if name in values else _ABSENT


def _first_apart(section: str, what: str, a: Mapping[int, str], b: Mapping[int, str]) -> Iterator[Difference]:
    """The first number at which the two disagree, and how many they do not share."""
    shared = sorted(a.keys() & b.keys())
    first = next((number for number in shared if a[number] != b[number]), None)
    if first is not None:
        apart = sum(a[number] != b[number] for number in shared)
        yield Difference(section=section, what=f"{what} {first}, the first of {apart}", a=a[first], b=b[first])
    if a.keys() != b.keys():
        yield Difference(section=section, what="stored", a=_range(a), b=_range(b))


def _range(values: Mapping[int, str]) -> str:
    return f"{len(values)} from {min(values)} to {max(values)}" if values else "none"


def _metrics(a: Mapping[int, Mapping[str, Any]], b: Mapping[int, Mapping[str, Any]]) -> Iterator[Difference]:
    """Each metric that differs anywhere: its first step apart."""
    seen: set[str] = set()
    for step in sorted(a.keys() & b.keys()):
        for found in _differing("metrics", computed_metrics(a[step]), computed_metrics(b[step])):
            if found.what not in seen:
                seen.add(found.what)
                yield Difference(section="metrics", what=f"{found.what}, from step {step} on", a=found.a, b=found.b)
    if a.keys() != b.keys():
        yield Difference(
            section="metrics",
            what="steps",
            a=_range(dict.fromkeys(a, "")),
            b=_range(dict.fromkeys(b, "")),
        )


def _data(run: StoredRun) -> dict[str, str]:
    try:
        return {"dataset_sha256": run.dataset_sha256()}
    except DataError:
        return {}


def _rollouts(run: StoredRun) -> dict[int, str]:
    """Content digest by step; the files are read and their hashes checked.

    Raises:
        StorageError: one that the run refers to is missing or damaged.
    """
    if not run.paths.rollout_index.is_file():
        return {}
    return {step: run.rollouts(step).content_digest for step, _ in run.rollout_refs()}


def _weights(run: StoredRun) -> dict[int, str]:
    """Checksum by policy version."""
    if not run.paths.certificates.is_file():
        return {}
    return {certificate.policy_version: certificate.checksum for certificate in run.certificates()}


def _rows(run: StoredRun) -> dict[int, Mapping[str, Any]]:
    return {row["step"]: row for row in run.metrics()} if run.paths.metrics.is_file() else {}


def _evaluation(run: StoredRun) -> dict[str, Any]:
    return flattened(_without_times(run.evaluation())) if run.paths.evaluation.is_file() else {}


def _without_times(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_times(value) if isinstance(value, Mapping) else value
        for name, value in values.items()
        if not name.endswith(("_s", "_ms")) and name != "seconds"
    }
