"""`grpo parity compare`: what two sets of finished runs recorded, read from their folders and judged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_lib.parity.finished_run import FinishedRun
from grpo_lib.parity.report import to_dict
from grpo_lib.parity.runs import compare_runs
from grpo_lib.stages.stored_run import StoredRun
from grpo_lib.types import RolloutGroup, VerdictReason, VerdictState


def run(runs_a: Sequence[StoredRun], runs_b: Sequence[StoredRun], *, differs: Sequence[str] = ()) -> dict[str, Any]:
    """Compare two sets of finished runs, one run per seed; nothing is raised for a FAIL.

    Args:
        differs: Settings that are meant to differ between the sides.

    Returns:
        `parity.report.to_dict` of the report.

    Raises:
        DataError: a run is not finished, or the runs of a side do not belong together.
        ConfigError: `differs` names something that is not a setting.
    """
    sides = [[finished(stored) for stored in runs] for runs in (runs_a, runs_b)]
    return to_dict(compare_runs(*sides, differs=differs))


def finished(stored: StoredRun) -> FinishedRun:
    """What a comparison needs of a run."""
    rows = stored.metrics()
    accuracy = stored.evaluation()["after"]["sampled_pass_at_1"]["value"]
    return FinishedRun(
        name=stored.reference,
        folder=str(stored.paths.run),
        config=stored.config,
        lineage=stored.lineage,
        rows=rows,
        accuracy=accuracy,
        correct_by_prompt=correct_by_prompt(stored.probe_rollouts().groups),
        dataset_sha256=stored.dataset_sha256(),
        first_samples=stored.rollouts(1).content_digest,
        own_verdict=stored.parity()["verdict"] if stored.paths.parity.is_file() else None,
    )


def correct_by_prompt(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Prompt id → share of correct ones among the judged samples; NaN where none was judged."""
    shares = {}
    for group in groups:
        judged = [r.verdict for r in group.rollouts if r.verdict.state is not VerdictState.FAILED]
        correct = sum(verdict.reason is VerdictReason.CORRECT for verdict in judged)
        shares[group.prompt.prompt_id] = correct / len(judged) if judged else float("nan")
    return shares
