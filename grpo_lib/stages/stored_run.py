"""A finished or stopped run as it lies on disk: written by the flow's steps, opened by folder or by Metaflow run id."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from grpo_lib.config import RunConfig
from grpo_lib.data.files import whole_file
from grpo_lib.data.models import resolve_model_path
from grpo_lib.data.store import read_manifest
from grpo_lib.errors import DataError
from grpo_lib.stages.recorder import read_certificates
from grpo_lib.stages.run_paths import RECORD, RunPaths
from grpo_lib.storage.locations import is_remote
from grpo_lib.storage.refs import ArtifactStore, StoreRef
from grpo_lib.storage.rollouts import StoredRollouts, read_rollouts
from grpo_lib.tracking import read_metrics
from grpo_lib.types import SyncCertificate

FORMAT = 1
_SETTING = "storage.root"
_RUN_ID = re.compile(r"(\w+/)?\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """One run on disk. Every method reads the file it needs when it is called.

    Raises:
        DataError: in every method, when its file is missing or damaged; the message says which step writes it.
    """

    reference: str  # as the user gave it
    run_id: str  # e.g. "GRPOFlow/123"
    config: RunConfig
    config_hash: str
    lineage: Mapping[str, Any]
    paths: RunPaths
    origins: tuple[str, ...] = ()  # ids of the runs that it continues under an id of its own, nearest first

    def metrics(self) -> list[dict[str, Any]]:
        """Rows of the metrics file, one per step that was finished."""
        return list(read_metrics(self._present(self.paths.metrics, "fit")))

    def certificates(self) -> list[SyncCertificate]:
        """Of every weight push, in order."""
        return read_certificates(self._present(self.paths.certificates, "fit"))

    def rollout_refs(self) -> list[tuple[int, StoreRef]]:
        """(step, store reference of its rollouts), in step order."""
        lines = self._present(self.paths.rollout_index, "fit").read_text(encoding="utf-8").splitlines()
        refs = []
        for number, line in enumerate(lines, start=1):
            entry = _object(line, f"{self.paths.rollout_index}, line {number}")
            step = entry.pop("step", None)
            if type(step) is not int:
                raise DataError(f"{self.paths.rollout_index}, line {number} names no step; delete that line")
            refs.append((step, StoreRef.from_dict(entry)))
        return refs

    def rollouts(self, step: int) -> StoredRollouts:
        """The groups that step `step` was trained on."""
        refs = dict(self.rollout_refs())
        if step not in refs:
            stored = f"{min(refs)} to {max(refs)}" if refs else "none"
            raise DataError(f"run {self.reference} stored no rollouts of step {step}; stored are: {stored}")
        return read_rollouts(self.store(), refs[step])

    def evaluation(self) -> dict[str, Any]:
        """`EvaluationResult.to_dict()` of the run's `evaluate`."""
        return self._evaluation()["evaluation"]

    def probe_rollouts(self) -> StoredRollouts:
        """The trained policy's samples on the held-out prompts."""
        return read_rollouts(self.store(), StoreRef.from_dict(self._evaluation()["probe_rollouts"]))

    def engine_scores_ref(self) -> StoreRef | None:
        """The engine's own score of the probe rollouts, see `storage.scores`; None where nobody asked it."""
        ref = self._evaluation().get("engine_scores")
        return None if ref is None else StoreRef.from_dict(ref)

    def parity(self) -> dict[str, Any]:
        """`parity.report.to_dict` of the run's own `parity_report`."""
        return _read(self._present(self.paths.parity, "parity_report"))

    def dataset_sha256(self) -> str:
        """Hash of the prepared prompts."""
        return read_manifest(self.paths.data).dataset_sha256

    @property
    def policy_version(self) -> int:
        """Of the exported model and the probe rollouts."""
        return self._evaluation()["policy_version"]

    @property
    def model_path(self) -> Path:
        """The base model's folder."""
        return resolve_model_path(self.config.model.path)

    def store(self) -> ArtifactStore:
        """Where the rollouts are."""
        if not is_remote(self.paths.store) and not Path(self.paths.store).is_dir():
            raise DataError(
                f"run {self.reference}: the store {self.paths.store} is missing; a moved run needs the store at the "
                f"same place relative to its folder ({self.paths.run}), so move the whole storage.root"
            )
        return self.paths.open_store()

    def _evaluation(self) -> dict[str, Any]:
        return _read(self._present(self.paths.evaluation, "evaluate"))

    def _present(self, path: Path, step: str) -> Path:
        if not path.is_file():
            raise DataError(
                f"run {self.reference}: {path} is missing; the step {step} writes it, and did not get there in this "
                "run. Name a run that did, or finish this one"
            )
        return path


def open_run(reference: str) -> StoredRun:
    """A run by its folder, or by its Metaflow id ("GRPOFlow/123" or "123"). A folder of that name comes first.

    Raises:
        DataError: there is no such run, or its `run.json` is missing, damaged or of another version.
    """
    folder = Path(os.path.abspath(Path(reference).expanduser()))
    if not folder.is_dir():
        if not _RUN_ID.fullmatch(reference):
            raise DataError(
                f"{reference!r} is neither the folder of a run nor a Metaflow run id such as GRPOFlow/123 or 123"
            )
        from grpo_lib.metaflow_runs import run_folder  # only those who name a run by id pay for Metaflow's client

        folder = run_folder(reference)
    path = folder / RECORD
    if not path.is_file():
        raise DataError(f"{folder} is not the folder of a run: {path.name}, which the start step writes, is missing")
    values = _read(path)
    if values.get("format") != FORMAT:
        raise DataError(f"{path} has format {values.get('format')!r}; this version reads {FORMAT}")
    try:
        return StoredRun(
            reference=reference,
            run_id=values["run_id"],
            config=RunConfig.model_validate_json(json.dumps(values["config"]), strict=True),
            config_hash=values["config_hash"],
            lineage=values["lineage"],
            origins=tuple(values.get("origins", ())),
            paths=RunPaths(
                run_id=values["run_id"],
                run=folder,
                store=store if is_remote(store := values["store"]) else os.path.abspath(folder / store),
            ),
        )
    except KeyError as error:
        raise DataError(f"{path} has no {error}; it is damaged") from error
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False))
        raise DataError(f"{path} holds a configuration that this version cannot read: {problems}") from error


def write_run(
    paths: RunPaths,
    *,
    run_id: str,
    config: RunConfig,
    config_hash: str,
    lineage: Mapping[str, object],
    origins: Sequence[str] = (),
) -> None:
    """What makes a folder a run, `run.json`, and the store's knowledge of it.

    Args:
        origins: Ids of the runs that it continues under an id of its own, nearest first.

    Raises:
        StorageError: it cannot be written; so do the two functions below.
    """
    record = {
        "format": FORMAT,
        "run_id": run_id,
        "config": config.model_dump(mode="json"),
        "config_hash": config_hash,
        "lineage": dict(lineage),
        "origins": list(origins),
        # relative, so that a storage root can be moved as a whole
        "store": paths.store if is_remote(paths.store) else os.path.relpath(paths.store, paths.run),
    }
    _write(paths.record, record)
    mirror = paths.mirror()
    mirror.register()
    mirror.publish(paths.record)


def write_evaluation(
    paths: RunPaths,
    *,
    evaluation: Mapping[str, Any],
    probe_rollouts: Mapping[str, Any],
    policy_version: int,
    engine_scores: Mapping[str, Any] | None = None,
) -> None:
    """Accuracies, and where the trained policy's samples are stored; with them the engine's score, if it was asked."""
    values = {
        "policy_version": policy_version,
        "evaluation": evaluation,
        "probe_rollouts": probe_rollouts,
        "engine_scores": engine_scores,
    }
    _write(paths.evaluation, values)


def write_parity(paths: RunPaths, report: Mapping[str, Any]) -> None:
    """The run's own report."""
    _write(paths.parity, report)


def _write(path: Path, values: Mapping[str, Any]) -> None:
    text = json.dumps(values, indent=2, allow_nan=False)
    with whole_file(path, setting=_SETTING) as scratch:
        scratch.write_text(text + "\n", encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    return _object(path.read_text(encoding="utf-8", errors="replace"), str(path))


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise DataError(f"{where} is not JSON ({error}); it is damaged") from error
    if not isinstance(values, dict):
        raise DataError(f"{where} holds a JSON {type(values).__name__}; expected an object")
    return values
