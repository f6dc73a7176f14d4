"""Why a probe failed: the scores at hand are bisected, nothing is started but a plain model in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from grpo_lib.config import RunConfig
from grpo_lib.parity.bisect import Diagnosis, with_diagnosis
from grpo_lib.parity.bisect_records import bisect_certificates
from grpo_lib.parity.bisect_scores import bisect_scores
from grpo_lib.stages.scorers import scoring_plan, stored_documents
from grpo_lib.trainers.hf_checkpoint import HfFolder
from grpo_lib.trainers.hf_reference import HfReference
from grpo_lib.types import ParityReport, ParityVerdict, RolloutGroup, SyncCertificate


def diagnosed(
    report: ParityReport,
    config: RunConfig,
    *,
    groups: Sequence[RolloutGroup],
    scores: Mapping[str, Mapping[str, np.ndarray]],
    models: Mapping[int, Path],
    policy_version: int,
    certificates: Sequence[SyncCertificate] = (),
) -> ParityReport:
    """The report with the causes that bisect finds, if it FAILs; as it is otherwise.

    Args:
        scores: Scorer name → sample id → [R].
        models: Policy version → folder with its weights: the probed one's and others that a scorer may hold instead.
        policy_version: That all scorers should hold.
    """
    if report.verdict is not ParityVerdict.FAIL:
        return report
    reference = HfReference(
        models[policy_version],
        dtype=config.model.dtype,
        temperature=config.rollout.temperature,
        version=policy_version,
        weights={version: HfFolder(path).tensor for version, path in models.items()},
    )
    plan = scoring_plan(stored_documents(groups), config.trainer, num_ranks=config.trainer.num_ranks)
    batches = [batch for rank in plan.micro_batches for batch in rank]
    found = bisect_scores(scores, batches, reference, tolerance=config.parity.max_abs)
    return with_diagnosis(report, Diagnosis.merged([found, bisect_certificates(certificates)]))
