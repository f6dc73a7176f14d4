"""The driver's side of a weight push: pause, send, compare what left with what arrived, resume, and prove it.

Only structural protocols stand between this file and the processes, so that a test can break any single part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from grpo_lib.algo.checksum import checksum_digest
from grpo_lib.config import DeadlinesConfig, WeightSyncConfig
from grpo_lib.errors import WeightSyncError
from grpo_lib.types import CanaryResult, SenderReport, SyncCertificate, WeightReceipt

_BARRIER = "deadlines.barrier_s"
_SYNC = "deadlines.weight_sync_s"


class SendingRanks(Protocol):
    """All trainer ranks. Each call returns when every rank has answered, or raises naming those that have not."""

    def arrive(self, *, deadline_s: float, setting: str) -> None:
        """Every rank is up and idle."""
        ...

    def connect_weights(self, client: object, *, port: int, deadline_s: float, setting: str) -> None:
        """Every rank opens its `WeightSender`; rank 0 gets the client."""
        ...

    def push_weights(self, policy_version: int, *, deadline_s: float, setting: str) -> SenderReport:
        """Every rank pushes; the report is rank 0's."""
        ...


class ReceivingEngines(Protocol):
    """All engines. Calls behave as those of `SendingRanks`; results are in the engines' order."""

    def arrive(self, *, deadline_s: float, setting: str) -> None: ...

    def weight_client(self) -> object:
        """How rank 0 calls all engines during a transfer."""
        ...

    def checkpoint_names(self) -> Sequence[frozenset[str]]:
        """By engine, the Hugging Face names of its own model folder."""
        ...

    def pause(self) -> None: ...

    def sleep(self) -> None:
        """Free the GPU memory; legal while paused."""
        ...

    def wake(self) -> None:
        """Take it back; legal while asleep. What follows is a push."""
        ...

    def commit_weights(self, policy_version: int) -> Sequence[WeightReceipt]:
        """Label the received weights and return what every worker of every engine received."""
        ...

    def policy_versions(self) -> Sequence[int]: ...

    def resume(self) -> None: ...


Canary = Callable[[int], CanaryResult]  # policy version → engine's decode log-probabilities against the trainer's


class CertifiedWeightSync:
    """`WeightSync` whose certificate rests on what the engines report, not on what was meant to happen.

    Engines whose weights are not certified stay paused: nothing can be sampled from them until a later push succeeds.

    Args:
        canary: Decodes on every engine and scores the same tokens with the trainer.
    """

    def __init__(
        self,
        *,
        ranks: SendingRanks,
        engines: ReceivingEngines,
        config: WeightSyncConfig,
        deadlines: DeadlinesConfig,
        canary: Canary,
    ) -> None:
        self._ranks, self._engines = ranks, engines
        self._config, self._deadlines, self._canary = config, deadlines, canary
        self._checkpoint_names: tuple[frozenset[str], ...] = ()
        self._pushes = 0
        self._connected = False
        self._asleep = False

    def connect(self) -> None:
        if self._connected:
            raise WeightSyncError("weight sync is already connected")
        deadline = time.monotonic() + self._deadlines.barrier_s
        self._ranks.arrive(deadline_s=self._deadlines.barrier_s, setting=_BARRIER)
        self._engines.arrive(deadline_s=max(deadline - time.monotonic(), 0.0), setting=_BARRIER)
        self._ranks.connect_weights(
            self._engines.weight_client(),
            port=self._config.port,
            deadline_s=self._deadlines.weight_sync_s,
            setting=_SYNC,
        )
        self._checkpoint_names = tuple(self._engines.checkpoint_names())
        self._connected = True

    def push(self, policy_version: int) -> SyncCertificate:
        if not self._connected:
            raise WeightSyncError("weight sync: push before connect")
        if self._asleep:
            self._engines.wake()
            self._asleep = False
        else:
            self._engines.pause()
        started = time.perf_counter()
        report = self._ranks.push_weights(policy_version, deadline_s=self._deadlines.weight_sync_s, setting=_SYNC)
        receipts = self._engines.commit_weights(report.policy_version)
        transfer_s = time.perf_counter() - started
        certificate = certify(
            policy_version=policy_version,
            report=report,
            receipts=receipts,
            checkpoint_names=self._checkpoint_names,
            engine_versions=self._engines.policy_versions(),
            transfer_s=transfer_s,
        )
        canary_due = self._pushes % self._config.canary_every == 0
        self._pushes += 1
        if not certificate.ok:
            return certificate
        self._engines.resume()
        if canary_due:
            certificate = replace(certificate, canary=self._canary(policy_version))
            if not certificate.ok:
                self._engines.pause()
        return certificate

    def release(self) -> None:
        if not self._asleep:
            self._engines.pause()
            self._engines.sleep()
            self._asleep = True


def certify(
    *,
    policy_version: int,
    report: SenderReport,
    receipts: Sequence[WeightReceipt],
    checkpoint_names: Sequence[frozenset[str]],
    engine_versions: Sequence[int],
    transfer_s: float,
) -> SyncCertificate:
    """Compare what was sent with what every worker received and with what every engine's own checkpoint holds.

    Raises:
        WeightSyncError: there is nothing to compare; a certificate over no engine would be empty, and so "ok".
    """
    if not receipts or not checkpoint_names or not engine_versions:
        raise WeightSyncError(
            f"weight sync of version {policy_version}: {len(receipts)} receipts, {len(checkpoint_names)} checkpoints "
            f"and {len(engine_versions)} engine versions; every engine must report all three"
        )
    sent = report.checksums.keys()
    missing = {name for names in checkpoint_names for name in names - sent}
    unexpected = {name for names in checkpoint_names for name in sent - names}
    unloaded = {name for receipt in receipts for name in receipt.unloaded}
    mismatched = {
        name
        for receipt in receipts
        for name in sent | receipt.checksums.keys()
        if report.checksums.get(name) != receipt.checksums.get(name)
    }
    return SyncCertificate(
        policy_version=policy_version,
        engine_versions=tuple(engine_versions),
        num_tensors=len(report.checksums),
        num_bytes=report.num_bytes,
        transfer_s=transfer_s,
        missing=tuple(sorted(missing)),
        unexpected=tuple(sorted(unexpected)),
        unloaded=tuple(sorted(unloaded)),
        mismatched=tuple(sorted(mismatched)),
        checksum=checksum_digest(report.checksums),
    )
