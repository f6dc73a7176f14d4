"""From a reported number back to what made it: rollouts, weights, data, code. Every link is checked as it is shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from grpo_lib.algo.metrics import rollout_metrics
from grpo_lib.config import flat
from grpo_lib.data.prompts import Split
from grpo_lib.data.store import read_manifest, read_prompts
from grpo_lib.errors import DataError, GrpoError
from grpo_lib.recipes import RECIPES
from grpo_lib.stages.checkpoints import newest_complete
from grpo_lib.stages.lineage import model_hash
from grpo_lib.stages.stored_run import StoredRun
from grpo_lib.storage.rollouts import StoredRollouts
from grpo_lib.types import SyncCertificate


class LinkState(StrEnum):
    """`STATED` cannot be checked from here: it is what the run wrote down about itself."""

    CHECKED = "checked"
    STATED = "stated"
    BROKEN = "BROKEN"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One link of the chain."""

    what: str
    state: LinkState
    text: str


def run(stored: StoredRun, step: int | None = None) -> tuple[Link, ...]:
    """The chain of one step, the last one when absent, from its metrics down to the machine.

    A link that is missing or damaged is `BROKEN`, with what is wrong; the links below it are still shown.

    Raises:
        DataError: the run has no metrics, or not of that step.
    """
    rows = {row["step"]: row for row in stored.metrics()}
    if not rows:
        raise DataError(f"run {stored.reference} has finished no step yet")
    step = max(rows) if step is None else step
    if step not in rows:
        raise DataError(f"run {stored.reference} has no step {step}; it has {min(rows)} to {max(rows)}")
    return tuple(_links(stored, rows[step]))


def _links(stored: StoredRun, row: Mapping[str, Any]) -> Iterator[Link]:
    step = int(row["step"])
    sampled_by = int(row["policy_version"]) - int(row["optim/applied"])
    yield _stated("step", f"{step} of run {stored.run_id} in {stored.paths.run}")
    yield from _guarded("rollouts", lambda: _rollout_links(stored, row, sampled_by))
    yield from _guarded("weights", lambda: _weight_links(stored, sampled_by))
    yield from _guarded("checkpoint", lambda: _checkpoint_links(stored, step))
    yield from _guarded("model", lambda: _model_links(stored))
    yield from _guarded("data", lambda: _data_links(stored))
    yield from _origin_links(stored)


def _guarded(what: str, links: Callable[[], Iterator[Link]]) -> Iterator[Link]:
    """A link that cannot be read is broken; the chain goes on."""
    try:
        yield from links()
    except GrpoError as error:
        yield Link(what=what, state=LinkState.BROKEN, text=str(error))


def _rollout_links(stored: StoredRun, row: Mapping[str, Any], sampled_by: int) -> Iterator[Link]:
    """The groups the step trained on, hashed again, and the metrics that follow from them, computed again."""
    step = int(row["step"])
    rollouts = stored.rollouts(step)
    ref = dict(stored.rollout_refs())[step]
    samples = [rollout for group in rollouts.groups for rollout in group.rollouts]
    versions = sorted({span.version for rollout in samples for span in rollout.completion.version_spans})
    if versions and versions[-1] > sampled_by:
        raise DataError(f"step {step} trained on tokens of version {versions[-1]}, but the step began at {sampled_by}")
    yield _checked(
        "rollouts",
        f"{len(rollouts.groups)} groups, {len(samples)} samples by policy version {_listed(versions)}; "
        f"artifact {ref.key}, {ref.size_bytes:,} bytes, content {rollouts.content_digest}",
    )
    yield _recomputed(rollouts, row, sampled_by)


def _recomputed(rollouts: StoredRollouts, row: Mapping[str, Any], sampled_by: int) -> Link:
    values = rollout_metrics(rollouts.groups, rollouts.assessments, policy_version=sampled_by).values()
    shared = {name: value for name, value in values.items() if name in row}
    wrong = [
        f"{name} is recorded as {row[name]} and computes to {value}"
        for name, value in shared.items()
        if not _same(row[name], value)
    ]
    if wrong:
        return Link(what="metrics", state=LinkState.BROKEN, text="; ".join(wrong))
    return _checked(
        "metrics",
        f"reward/mean {row['reward/mean']:.4f}: {len(shared)} metrics computed again from the rollouts, equal",
    )


def _same(recorded: float | None, value: float) -> bool:
    """Null is what a number that was not observed is recorded as."""
    return not math.isfinite(value) if recorded is None else recorded == value


def _weight_links(stored: StoredRun, version: int) -> Iterator[Link]:
    """The push that gave the engines the weights that sampled."""
    found = [certificate for certificate in stored.certificates() if certificate.policy_version == version]
    if not found:
        yield Link(
            what="weights",
            state=LinkState.BROKEN,
            text=f"no certificate of policy version {version}, which sampled the rollouts",
        )
        return
    certificate = found[-1]
    state = LinkState.CHECKED if certificate.ok else LinkState.BROKEN
    yield Link(what="weights", state=state, text=_certificate_text(certificate))


def _certificate_text(certificate: SyncCertificate) -> str:
    canary = certificate.canary
    decoded = "" if canary is None else f", canary {canary.max_abs:.2g} of {canary.tolerance:g} nats"
    return (
        f"version {certificate.policy_version}, {certificate.num_tensors} tensors, {certificate.num_bytes:,} bytes, "
        f"checksum {certificate.checksum}, {'certified' if certificate.ok else 'NOT certified'}{decoded}"
    )


def _checkpoint_links(stored: StoredRun, step: int) -> Iterator[Link]:
    point = newest_complete(stored.paths, at_most=step - 1)
    if point is None:
        yield _stated("state before", f"the base model and {step - 1} steps: no checkpoint before this step is kept")
        return
    since = step - 1 - point.state.steps_done
    text = f"{point.path}, whole, and {since} steps; `grpo run replay-step` computes the step again"
    yield _checked("state before", text)


def _model_links(stored: StoredRun) -> Iterator[Link]:
    recorded, found = stored.lineage.get("model_sha256"), model_hash(stored.model_path)
    if recorded == found:
        yield _checked("base model", f"{stored.model_path}, sha256 {found}")
    else:
        text = f"{stored.model_path} has sha256 {found} now, and had {recorded} when the run began"
        yield Link(what="base model", state=LinkState.BROKEN, text=text)


def _data_links(stored: StoredRun) -> Iterator[Link]:
    manifest = read_manifest(stored.paths.data)
    for split in Split:
        read_prompts(stored.paths.data, split)  # hashes files and contents
    prompts = ", ".join(f"{split.num_prompts:,} {name}" for name, split in manifest.splits.items())
    yield _checked("data", f"{prompts} prompts, sha256 {manifest.dataset_sha256}, template {manifest.template}")


def _origin_links(stored: StoredRun) -> Iterator[Link]:
    origin = stored.lineage
    git = origin.get("git")
    code = "outside a checkout" if not git else f"commit {git['commit']}"
    if git and git["diff_sha256"]:
        code += f" with uncommitted changes, sha256 {git['diff_sha256']}"
    yield _stated("code", f"{code}; lock {origin.get('lock_sha256') or 'none'}")
    packages = {name: version for name, version in origin.get("packages", {}).items() if version}
    yield _stated("packages", ", ".join(f"{name} {version}" for name, version in packages.items()))
    yield _stated("machine", _flat_text(origin.get("machine", {})))
    yield _stated("switches", _flat_text(origin.get("switches", {})) or "none set")
    yield _stated("settings", f"recipe {stored.config.recipe}, {_changed(stored)}; hash {stored.config_hash}")


def _changed(stored: StoredRun) -> str:
    """What the run set beyond its recipe."""
    base = flat(RECIPES[stored.config.recipe]()) if stored.config.recipe in RECIPES else {}
    changed = [f"{key}={value}" for key, value in flat(stored.config).items() if base.get(key) != value]
    return ", ".join(changed) or "as it stands"


def _flat_text(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items() if value not in ([], None, ""))


def _listed(versions: list[int]) -> str:
    return ", ".join(map(str, versions))


def _checked(what: str, text: str) -> Link:
    return Link(what=what, state=LinkState.CHECKED, text=text)


def _stated(what: str, text: str) -> Link:
    return Link(what=what, state=LinkState.STATED, text=text)
