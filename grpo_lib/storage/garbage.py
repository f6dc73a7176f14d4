"""What nobody refers to any more, and how it goes: first a plan, then, if somebody wants it so, the removal."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from grpo_lib.errors import StorageError
from grpo_lib.storage.refs import ArtifactStore, Stored, StoreKind, StoreRef
from grpo_lib.storage.registry import KnownRun, known_runs, references


@dataclass(frozen=True, slots=True, kw_only=True)
class GarbagePlan:
    """What a removal would do."""

    runs: tuple[KnownRun, ...]
    live: tuple[str, ...]  # ids of runs that gave a sign of life within the grace period
    cutoff: float  # Unix time: only older things can be garbage
    referred: tuple[Stored, ...]
    young: tuple[Stored, ...]  # nobody refers to them yet
    garbage: tuple[Stored, ...]
    unfinished: tuple[Stored, ...]  # old leftovers of writers that died


def plan(store: ArtifactStore, *, grace_s: float, forgotten: Collection[str] = ()) -> GarbagePlan:
    """Find what no registered run refers to.

    A run at work stores artifacts before it writes down that it did. So nothing is garbage that is younger than the
    grace period, or than the oldest run that is still alive; storing something again makes it young.

    Args:
        grace_s: How long a run may be silent and still count as alive. Longer than the time between two checkpoints.
        forgotten: Ids of runs as if the store did not know them; not of those that may be alive.

    Raises:
        StorageError: a run's folder is missing, so that nobody knows what it refers to; a forgotten run may be alive;
            or the store cannot be read.
    """
    now = time.time()
    known = known_runs(store)
    if unknown := set(forgotten) - {run.run_id for run in known}:
        raise StorageError(f"{store.location} knows no run {', '.join(sorted(unknown))}; grpo store ls shows those")
    alive = [run for run in known if run.last_sign > now - grace_s]
    if kept := [run.run_id for run in alive if run.run_id in forgotten]:
        raise StorageError(
            f"{', '.join(kept)} wrote something within the last {grace_s / 3600:g} hours and may be at work, so it is "
            "not given up; stop the run and wait, or shorten --grace-hours"
        )
    runs = [run for run in known if run.run_id not in forgotten]
    missing = [run.run_id for run in runs if run.folder_is_missing]
    if missing:
        raise StorageError(
            f"{store.location} knows {len(missing)} runs whose folders are missing: {', '.join(missing)}; what they "
            "refer to is unknown, so nothing is removed. Mount their disk, or give the run up with "
            f"grpo store gc --forget {missing[0]}"
        )
    cutoff = min([now - grace_s, *(run.registered for run in alive)])
    artifacts = list(store.artifacts())  # before the references: what is stored after this is not looked at
    keys = {key for run in runs for key in references(store, run).keys}
    return GarbagePlan(
        runs=tuple(runs),
        live=tuple(run.run_id for run in alive),
        cutoff=cutoff,
        referred=tuple(one for one in artifacts if one.name in keys),
        young=tuple(one for one in artifacts if one.name not in keys and one.modified >= cutoff),
        garbage=tuple(one for one in artifacts if one.name not in keys and one.modified < cutoff),
        unfinished=tuple(one for one in store.unfinished() if one.modified < cutoff),
    )


def remove(store: ArtifactStore, found: GarbagePlan) -> list[Stored]:
    """Remove a plan's garbage but for what was stored again since, each looked at when its turn comes; returns what was
    removed.

    Raises:
        StorageError: the store cannot be written.
    """
    removed = []
    for one in found.garbage:
        modified = store.modified(one.name)
        if modified is not None and modified < found.cutoff:
            store.remove(one.name)
            removed.append(one)
    for one in found.unfinished:
        store.remove_unfinished(one.name)
    return removed


def verify_all(
    store: ArtifactStore, refs: Collection[StoreRef], *, everything: bool
) -> Iterator[tuple[Stored, str | None]]:
    """Hash artifacts again; each comes with None, or with what is wrong with it.

    Args:
        refs: These must be there.
        everything: All other artifacts too.
    """
    wanted = {ref.key: ref for ref in refs}
    for one in store.artifacts():
        if one.name in wanted or everything:
            found = StoreRef(key=one.name, size_bytes=one.size_bytes, kind=StoreKind.FILE)
            yield one, _problem(store, wanted.pop(one.name, found))
    for ref in wanted.values():  # absent, or stored while the others were read
        yield Stored(name=ref.key, size_bytes=ref.size_bytes, modified=0.0), _problem(store, ref)


def _problem(store: ArtifactStore, ref: StoreRef) -> str | None:
    try:
        store.verify(ref)
    except StorageError as error:
        return str(error)
    return None
