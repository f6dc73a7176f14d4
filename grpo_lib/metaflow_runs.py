"""Metaflow's client, read only: from the id of a run to the folder where it keeps its files, and to its origins."""

# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false
# (metaflow declares no exports)

from __future__ import annotations

from pathlib import Path
from typing import Any

from metaflow import Flow, Run, namespace
from metaflow.exception import MetaflowNotFound

from grpo_lib.errors import DataError

FLOWS = ("GRPOFlow", "ParityFlow")  # both keep a `RunPaths` as `paths` in their first step
_SHOWN_RUNS = 5


def run_folder(reference: str) -> Path:
    """The folder that a run wrote to.

    Args:
        reference: "GRPOFlow/123", "ParityFlow/7", or "123" for the run of that id of either flow.

    Raises:
        DataError: Metaflow knows no such run here, or the run ended before it had a folder.
    """
    namespace(None)  # runs of every user and branch
    flow, _, run_id = reference.rpartition("/")
    for name in (flow,) if flow else FLOWS:
        try:
            run = Run(f"{name}/{run_id}")
        except MetaflowNotFound:
            continue
        return _folder_of(run)
    raise DataError(
        f"Metaflow knows no run {reference!r} here; {_latest()}. Local runs are found from the folder in which they "
        "were started; a run's folder works from everywhere"
    )


def origins_of(flow: str, origin_run_id: str) -> list[str]:
    """Ids of the runs that a resumed run continues, nearest first, e.g. ``["GRPOFlow/124", "GRPOFlow/123"]``.

    Args:
        origin_run_id: Of the nearest.
    """
    namespace(None)
    found: list[str] = []
    origin: str | None = f"{flow}/{origin_run_id}"
    while origin not in (None, f"{flow}/None", *found):  # Metaflow's word for a run that was not resumed
        found.append(origin)
        try:
            origin = Run(origin).origin_pathspec
        except MetaflowNotFound:  # removed since; what it left is only looked for under its id
            origin = None
    return found


def _folder_of(run: Run) -> Path:
    try:
        task = run["start"].task
        if task is not None:
            return _present(run, task["paths"].data)
    except (KeyError, MetaflowNotFound):
        pass
    raise DataError(
        f"run {run.pathspec} ended before its start step was done, so it has no folder; "
        f"python flows/grpo_flow.py logs {run.id}/start shows why"
    )


def _present(run: Run, paths: Any) -> Path:
    """The folder of a run's paths, unless another machine had it."""
    folder = Path(paths.run)
    if not folder.is_dir() and "://" in str(paths.store):
        raise DataError(
            f"the files of run {run.pathspec} are in {paths.store}: bring them here with `grpo store get --store "
            f"{paths.store} {paths.run_id} FOLDER`, then name FOLDER"
        )
    return folder


def _latest() -> str:
    """E.g. ``"the latest are GRPOFlow/12, GRPOFlow/11"``."""
    found = []
    for name in FLOWS:
        try:
            found += [(run.created_at, run.pathspec) for run, _ in zip(Flow(name), range(_SHOWN_RUNS), strict=False)]
        except MetaflowNotFound:
            continue
    names = [pathspec for _, pathspec in sorted(found, reverse=True)[:_SHOWN_RUNS]]
    return f"the latest are {', '.join(names)}" if names else "there are no runs at all"
