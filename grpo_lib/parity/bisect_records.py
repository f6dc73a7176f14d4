"""What a run's own records say without running anything: certificates, versions, seeds, and whose samples these are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grpo_lib.parity.bisect import Cause, Diagnosis, Finding, is_root_level, listed
from grpo_lib.parity.replay_inputs import InputAudit
from grpo_lib.types import RolloutGroup, SyncCertificate

_ENGINE = "weight sync"
_STORE = "stored rollouts"


def bisect_certificates(certificates: Sequence[SyncCertificate], pushed: Sequence[int] = ()) -> Diagnosis:
    """Name tensors and versions of every certificate that is not ok.

    Args:
        pushed: Versions that the run reached; each needs a push.
    """
    findings = [finding for certificate in certificates for finding in _certificate(certificate)]
    skipped = sorted(set(pushed) - {certificate.policy_version for certificate in certificates})
    if skipped:
        findings.append(
            Finding(
                cause=Cause.ENGINE_BEHIND,
                subject=_ENGINE,
                where=listed([f"version {version}" for version in skipped]),
                evidence=f"the run reached {len(skipped)} versions that were never pushed to the engine",
            )
        )
    return Diagnosis(findings=tuple(findings))


def _certificate(certificate: SyncCertificate) -> list[Finding]:
    at = f"push of version {certificate.policy_version}"
    findings = []
    absent = sorted({*certificate.missing, *certificate.unloaded})
    for cause, names, what in (
        (Cause.TENSORS_NOT_SENT, absent, "the engine's checkpoint has them and none arrived"),
        (Cause.TENSORS_DAMAGED, certificate.mismatched, "checksums of sender and engine differ"),
        (Cause.TENSORS_DAMAGED, certificate.unexpected, "they were sent, and the engine's checkpoint has no such name"),
    ):
        if names:
            findings.append(
                Finding(
                    cause=cause,
                    subject=_ENGINE,
                    where=f"{_levels(names)}, {at}",
                    evidence=f"{len(names)} of {certificate.num_tensors} tensors: {what}",
                )
            )
    behind = [version for version in certificate.engine_versions if version != certificate.policy_version]
    if behind:
        findings.append(
            Finding(
                cause=Cause.ENGINE_BEHIND,
                subject=_ENGINE,
                where=at,
                evidence=f"{len(behind)} of {len(certificate.engine_versions)} engines report version {listed(behind)}",
            )
        )
    if certificate.canary is not None and not certificate.canary.ok and not findings:
        findings.append(
            Finding(
                cause=Cause.DECODE_DIFFERS,
                subject=_ENGINE,
                where=at,
                evidence=(
                    f"every checksum agrees, and {certificate.canary.num_tokens} tokens decoded by the engine are up "
                    f"to {certificate.canary.max_abs:.2g} nats from the trainer's score (tolerance "
                    f"{certificate.canary.tolerance:g})"
                ),
            )
        )
    return findings


def _levels(names: Sequence[str]) -> str:
    """Names, with what they have in common: all root-level, all of blocks, or both."""
    root = [name for name in names if is_root_level(name)]
    level = "root-level tensors" if len(root) == len(names) else "block tensors" if not root else "tensors"
    return f"{level} {listed(names)}"


def bisect_inputs(
    audits: Sequence[InputAudit],
    *,
    groups: Sequence[RolloutGroup] = (),
    other_run: Mapping[tuple[int, ...], str] | None = None,
) -> Diagnosis:
    """Name stored samples that the run cannot have drawn.

    Args:
        audits: From `replay_inputs.audit_inputs`.
        groups: Of the audited steps, to look foreign samples up by their tokens.
        other_run: Prompt and response ids → sample id of a run that they may come from.
    """
    findings = []
    foreign = [sample_id for audit in audits for sample_id in audit.wrong_seeds]
    if foreign:
        findings.append(
            Finding(
                cause=Cause.FOREIGN_ROLLOUTS,
                subject=_STORE,
                where=listed(foreign, most=20),
                evidence=(
                    f"{len(foreign)} of {sum(audit.num_samples for audit in audits)} samples carry a seed that the "
                    f"run's own does not give their group and index{_found_in(foreign, groups, other_run)}"
                ),
            )
        )
    wrong = [group_id for audit in audits for group_id in audit.wrong_advantages]
    if wrong:
        findings.append(
            Finding(
                cause=Cause.ADVANTAGES_CHANGED,
                subject=_STORE,
                where=f"groups {listed(wrong)}",
                evidence="the stored advantages are not those of the stored rewards",
            )
        )
    return Diagnosis(findings=tuple(findings))


def find_samples(
    sample_ids: Sequence[str], groups: Sequence[RolloutGroup], other_run: Mapping[tuple[int, ...], str]
) -> dict[str, str]:
    """Sample id → id of the other run's sample with the same prompt and response, for those that are found."""
    wanted = set(sample_ids)
    tokens = {
        group.sample_id(rollout.sample_index): (*group.prompt.token_ids, *rollout.completion.token_ids.tolist())
        for group in groups
        for rollout in group.rollouts
        if group.sample_id(rollout.sample_index) in wanted
    }
    return {sample_id: other_run[ids] for sample_id, ids in tokens.items() if ids in other_run}


def _found_in(
    foreign: Sequence[str], groups: Sequence[RolloutGroup], other_run: Mapping[tuple[int, ...], str] | None
) -> str:
    if other_run is None:
        return ""
    found = find_samples(foreign, groups, other_run)
    named = listed([f"{own} is {other}" for own, other in found.items()])
    return f"; {len(found)} of them are in the other run by their tokens ({named})"
