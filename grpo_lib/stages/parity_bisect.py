"""Where and why two scorers of a stored run part: the run's steps are taken again and judged by an independent model.

Trainers train on the stored rollouts, each step from the same state; what the engine stored with them is scored under
the weights of the version that drew them. The walk ends at the first step in which something is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from grpo_lib.config import TRAINERS, RunConfig
from grpo_lib.data.files import storage_errors
from grpo_lib.errors import ConfigError, DataError, GrpoError
from grpo_lib.interfaces import ReplayTrainer
from grpo_lib.parity.bisect import DIAGNOSIS, Cause, Diagnosis
from grpo_lib.parity.bisect_records import bisect_certificates, bisect_inputs
from grpo_lib.parity.bisect_replay import ReplaySide, StoredScores, bisect_replay
from grpo_lib.parity.bisect_verdicts import bisect_report
from grpo_lib.parity.probe import ENGINE_DECODE
from grpo_lib.parity.replay_inputs import ReplayBatch, audit_inputs
from grpo_lib.parity.report import to_dict
from grpo_lib.stages.checkpoints import checkpoints_of
from grpo_lib.stages.live import live_trainers
from grpo_lib.stages.parity_probe import PLAIN
from grpo_lib.stages.parity_replay import stored_batches, with_backend
from grpo_lib.stages.replay_files import StateFile
from grpo_lib.stages.scorers import scoring_plan, stored_documents
from grpo_lib.stages.stored_run import StoredRun
from grpo_lib.trainers.hf_reference import HfReference
from grpo_lib.types import ParityVerdict

ENGINE = "engine"
_VERSIONS_BEFORE = 2  # that a step's suspects may have stayed at


def run(run: StoredRun, *, a: str, b: str, step: int | None = None) -> dict[str, Any]:
    """Judge two scorers; nothing is raised for a FAIL.

    Args:
        a: A trainer backend, ``"engine"`` for what was stored as the samples were drawn, or ``"hf"``, the plain
            forward that judges both.
        b: Another one.
        step: The only step to judge; the first `parity.replay_steps` ones by default, up to the first that is wrong.

    Returns:
        `parity.report.to_dict` of the report.

    Raises:
        ConfigError: an unknown scorer, or the same one twice.
        DataError: the run did not store what is needed.
    """
    names = [ENGINE if name == ENGINE_DECODE else name for name in (a, b)]
    _check_names(names)
    batches = _batches(run, step)
    configs = [with_backend(run.config, backend) for backend in _backends(names, run.config)]
    with _scratch(run) as scratch, live_trainers(configs, model_path=run.model_path) as trainers:
        first_taken = _start(run, trainers[0], step)
        judged = bisect_replay(
            [ReplaySide(trainer=trainer, config=config) for trainer, config in zip(trainers, configs, strict=True)],
            [batch for batch in batches if batch.step >= first_taken],
            scratch=scratch,
            read=StateFile,
            make_reference=partial(_reference, run),
            read_stored=partial(_stored_scores, run) if ENGINE in names else None,
            first_judged=step or 1,
        )
    if not judged:
        raise DataError(f"run {run.reference}: step {step} has no trainable token, so nobody scored or trained on it")
    return to_dict(bisect_report(judged, _records(run, batches), run.config.parity))


def causes_of(
    report: Mapping[str, Any], run_: StoredRun, *, trainers: Sequence[str], bisect: Callable[..., dict[str, Any]] = run
) -> dict[str, list[dict[str, Any]]]:
    """Tables of what bisect finds behind a replay's report; none unless it FAILs.

    Args:
        report: `parity.report.to_dict` of a replay.
        run_: Whose rollouts were replayed.
        trainers: The leader first; each other one is judged beside it.
        bisect: `run` of this module, and what it is called like.
    """
    tables: dict[str, list[dict[str, Any]]] = {}
    if report["verdict"] == ParityVerdict.FAIL:
        leader, *followers = trainers
        for follower in followers:
            for name, rows in _causes(run_, follower, leader, bisect).items():
                tables.setdefault(name, []).extend(row for row in rows if row not in tables[name])
    return tables


def with_causes(report: Mapping[str, Any], causes: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """The report with the tables of `causes_of` after its own."""
    tables = {name: list(rows) for name, rows in report["tables"].items()}
    for name, rows in causes.items():
        tables[name] = [*tables.get(name, ()), *rows]
    return {**report, "tables": tables}


def _causes(
    run_: StoredRun, follower: str, leader: str, bisect: Callable[..., dict[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """Tables of a bisect; one that finds nothing or cannot be made says so, since the verdict stands without it."""
    try:
        tables = bisect(run_, a=follower, b=leader)["tables"]
    except GrpoError as error:
        return {DIAGNOSIS: [_unexplained(follower, leader, where="not bisected", evidence=str(error))]}
    if tables[DIAGNOSIS]:
        return tables
    where = f"{len(tables['judged_steps'])} judged steps"
    evidence = "taken again, each step equals an independent model's within the tolerances of bisect"
    return {**tables, DIAGNOSIS: [_unexplained(follower, leader, where=where, evidence=evidence)]}


def _unexplained(follower: str, leader: str, *, where: str, evidence: str) -> dict[str, Any]:
    return {
        "cause": str(Cause.UNEXPLAINED),
        "subject": f"{follower} vs {leader}",
        "where": where,
        "evidence": evidence,
        "unexplained": None,
    }


@contextmanager
def _scratch(run: StoredRun) -> Iterator[Path]:
    """A folder that driver and ranks see, gone afterwards."""
    with storage_errors(run.paths.run, setting="storage.root"):
        scratch = TemporaryDirectory(prefix="bisect-", dir=run.paths.run)
    with scratch as folder:
        yield Path(folder)


def _check_names(names: Sequence[str]) -> None:
    known = (*TRAINERS, ENGINE, PLAIN)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(
            [f"bisect of {' and '.join(names)}: {unknown[0]!r} is no scorer; there are {', '.join(known)}"]
        )
    if names[0] == names[1]:
        raise ConfigError([f"bisect of {names[0]} with itself; name two of {', '.join(known)}"])


def _backends(names: Sequence[str], config: RunConfig) -> list[str]:
    """The trainers to start, the run's own first where the engine is judged.

    The engine sampled from the weights that the run's trainer made, and another backend's part from those by rounding
    that training amplifies.
    """
    own = [config.trainer.backend] if ENGINE in names else []
    return list(dict.fromkeys([*own, *(name for name in names if name in TRAINERS)])) or [config.trainer.backend]


def _batches(run: StoredRun, step: int | None) -> list[ReplayBatch]:
    batches = stored_batches(run, step)  # trainable steps, so at least up to that one
    if step is not None and batches[-1].step < step:
        run.rollouts(step)  # says which are stored
    return batches if step is None else [batch for batch in batches if batch.step <= step]


def _start(run: StoredRun, leader: ReplayTrainer, step: int | None) -> int:
    """Put the leader into the latest state of the run that leaves versions before the judged step; the next step."""
    if step is None or leader.name != run.config.trainer.backend:
        return 1
    done = {int(json.loads((path / "loop.json").read_text())["steps_done"]): path for path in checkpoints_of(run.paths)}
    usable = [steps_done for steps_done in done if steps_done < step - _VERSIONS_BEFORE]
    if not usable:
        return 1
    leader.load(done[max(usable)])
    return max(usable) + 1


def _reference(run: StoredRun, version: int, weights: Mapping[int, Callable[[str], torch.Tensor]]) -> HfReference:
    return HfReference(
        run.model_path,
        dtype=run.config.model.dtype,
        temperature=run.config.rollout.temperature,
        version=version,
        weights=weights,
    )


def _stored_scores(run: StoredRun, batch: ReplayBatch, version: int) -> StoredScores:
    """Of the samples that say they were drawn by `version`; with stale rollouts others have their own turn."""
    scores = {
        group.sample_id(rollout.sample_index): rollout.completion.logprobs
        for group in batch.groups
        for rollout in group.rollouts
        if {span.version for span in rollout.completion.version_spans} == {version}
    }
    documents = {key: value for key, value in stored_documents(batch.groups).items() if key in scores}
    if not documents:
        raise DataError(
            f"run {run.reference}: no sample of step {batch.step} was drawn by version {version}, the trainer's; judge "
            "the engine on a run with loop.max_staleness 0"
        )
    plan = scoring_plan(documents, run.config.trainer, num_ranks=run.config.trainer.num_ranks)
    recorded = {row["step"]: row.get("mismatch/abs_max") for row in _metrics(run)}.get(batch.step)
    return StoredScores(
        scores={key: scores[key] for key in documents},
        batches=tuple(packed for rank in plan.micro_batches for packed in rank),
        agreed=recorded is not None and recorded <= run.config.parity.max_abs,
    )


def _records(run: StoredRun, batches: Sequence[ReplayBatch]) -> Diagnosis:
    """What certificates, seeds and stored advantages say."""
    parts = [bisect_inputs(audit_inputs(batches, run.config))]
    if run.paths.certificates.is_file():
        pushed = [row["policy_version"] for row in _metrics(run)]
        parts.append(bisect_certificates(run.certificates(), pushed=pushed))
    return Diagnosis.merged(parts)


def _metrics(run: StoredRun) -> list[dict[str, Any]]:
    """Rows of the steps that were finished; none of a run that only sampled."""
    return run.metrics() if run.paths.metrics.is_file() else []
