"""A certificate says what differs, whichever part of a push is broken; engines without one stay paused."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from grpo_lib.algo.checksum import checksum_digest
from grpo_lib.config import DeadlinesConfig, WeightSyncConfig
from grpo_lib.errors import DeadlineExceeded, RankFailure, WeightSyncError
from grpo_lib.types import CanaryResult, SenderReport, WeightReceipt
from grpo_lib.weight_sync.sync import CertifiedWeightSync, certify

SENT = {"embed": 11, "norm": 12, "head": 13}
NAMES = frozenset(SENT)
REPORT = SenderReport(policy_version=5, checksums=SENT, num_bytes=120, seconds=0.1)
RECEIPT = WeightReceipt(checksums=SENT, num_bytes=120, unloaded=())
GOOD = {
    "policy_version": 5,
    "report": REPORT,
    "receipts": (RECEIPT, RECEIPT),
    "checkpoint_names": (NAMES, NAMES),
    "engine_versions": (5, 5),
    "transfer_s": 0.2,
}


def without(name: str) -> dict[str, int]:
    return {key: value for key, value in SENT.items() if key != name}


def test_all_equal_is_ok() -> None:
    certificate = certify(**GOOD)
    assert certificate.ok
    assert (certificate.num_tensors, certificate.num_bytes, certificate.transfer_s) == (3, 120, 0.2)
    assert certificate.checksum == checksum_digest(SENT)


@pytest.mark.parametrize(
    ("change", "field_name", "value"),
    [
        # the trainer skips a root parameter: engine and trainer agree on everything that was sent
        ({"report": replace(REPORT, checksums=without("norm")),
          "receipts": (replace(RECEIPT, checksums=without("norm")),) * 2}, "missing", ("norm",)),
        # a tied head is sent although the engine's checkpoint has none
        ({"checkpoint_names": (NAMES - {"head"},) * 2}, "unexpected", ("head",)),
        # one engine's model ignored a tensor
        ({"receipts": (RECEIPT, replace(RECEIPT, unloaded=("qkv",)))}, "unloaded", ("qkv",)),
        # a flipped bit on the way to the second engine
        ({"receipts": (RECEIPT, replace(RECEIPT, checksums=SENT | {"embed": 10}))}, "mismatched", ("embed",)),
        # a tensor that never arrived, and one that nobody sent
        ({"receipts": (replace(RECEIPT, checksums=without("head")), RECEIPT)}, "mismatched", ("head",)),
        ({"receipts": (replace(RECEIPT, checksums=SENT | {"ghost": 1}), RECEIPT)}, "mismatched", ("ghost",)),
        # an engine that was not told
        ({"engine_versions": (5, 4)}, "engine_versions", (5, 4)),
    ],
)  # fmt: skip
def test_each_difference_is_named(change: dict, field_name: str, value: tuple) -> None:
    certificate = certify(**(GOOD | change))
    assert not certificate.ok
    assert getattr(certificate, field_name) == value
    clean = {"missing", "unexpected", "unloaded", "mismatched"} - {field_name}
    assert all(getattr(certificate, name) == () for name in clean)


@pytest.mark.parametrize("nothing", [{"receipts": ()}, {"checkpoint_names": ()}, {"engine_versions": ()}])
def test_nothing_to_compare_is_not_ok(nothing: dict) -> None:
    with pytest.raises(WeightSyncError, match="every engine must report"):
        certify(**(GOOD | nothing))


# -- the driver's sequence ---------------------------------------------------------------------------------------------


@dataclass
class Journal:
    calls: list[str] = field(default_factory=list)


@dataclass
class FakeRanks:
    journal: Journal
    report: SenderReport = REPORT
    absent: bool = False
    failure: Exception | None = None

    def arrive(self, *, deadline_s: float, setting: str) -> None:
        self.journal.calls.append("ranks arrive")
        if self.absent:
            raise DeadlineExceeded(
                stage="barrier", waited_for="trainer rank 1 (of 2)", deadline_s=deadline_s, setting=setting
            )

    def connect_weights(self, client: object, *, port: int, deadline_s: float, setting: str) -> None:
        self.journal.calls.append(f"connect {client} port {port}")

    def push_weights(self, policy_version: int, *, deadline_s: float, setting: str) -> SenderReport:
        self.journal.calls.append(f"push {policy_version}")
        if self.failure is not None:
            raise self.failure
        return replace(self.report, policy_version=policy_version)


@dataclass
class FakeEngines:
    journal: Journal
    receipt: WeightReceipt = RECEIPT
    reported: int | None = None  # a version other than the committed one
    version: int = 0

    def arrive(self, *, deadline_s: float, setting: str) -> None:
        self.journal.calls.append("engines arrive")

    def weight_client(self) -> object:
        return "client"

    def checkpoint_names(self) -> tuple[frozenset[str], ...]:
        return (NAMES,)

    def pause(self) -> None:
        self.journal.calls.append("pause")

    def sleep(self) -> None:
        self.journal.calls.append("sleep")

    def wake(self) -> None:
        self.journal.calls.append("wake")

    def commit_weights(self, policy_version: int) -> tuple[WeightReceipt, ...]:
        self.journal.calls.append("commit")
        self.version = policy_version
        return (self.receipt,)

    def policy_versions(self) -> tuple[int, ...]:
        return (self.version if self.reported is None else self.reported,)

    def resume(self) -> None:
        self.journal.calls.append("resume")


@dataclass
class Parts:
    journal: Journal
    ranks: FakeRanks
    engines: FakeEngines
    canary_max: float = 1e-6

    def sync(self, canary_every: int = 3) -> CertifiedWeightSync:
        def canary(policy_version: int) -> CanaryResult:
            self.journal.calls.append(f"canary {policy_version}")
            return CanaryResult(num_tokens=4, max_abs=self.canary_max, mean_abs=0.0, tolerance=1e-4, seconds=0.0)

        return CertifiedWeightSync(
            ranks=self.ranks,
            engines=self.engines,
            config=WeightSyncConfig(canary_every=canary_every),
            deadlines=DeadlinesConfig(),
            canary=canary,
        )


@pytest.fixture
def parts() -> Parts:
    journal = Journal()
    return Parts(journal, FakeRanks(journal), FakeEngines(journal))


def test_order_of_a_push_and_when_the_canary_sings(parts: Parts) -> None:
    sync = parts.sync(canary_every=3)
    sync.connect()
    assert parts.journal.calls == ["ranks arrive", "engines arrive", "connect client port 0"]
    parts.journal.calls.clear()
    certificate = sync.push(5)
    assert certificate.ok
    assert parts.journal.calls == ["pause", "push 5", "commit", "resume", "canary 5"]
    due = [sync.push(version).canary is not None for version in range(6, 12)]
    assert due == [False, False, True, False, False, True]


def test_uncertified_weights_are_never_sampled_from(parts: Parts) -> None:
    sync = parts.sync()
    sync.connect()
    parts.engines.receipt = replace(RECEIPT, checksums=SENT | {"norm": 0})
    parts.journal.calls.clear()
    assert sync.push(5).mismatched == ("norm",)
    assert parts.journal.calls == ["pause", "push 5", "commit"], "neither resumed nor decoded from"
    parts.engines.receipt = RECEIPT
    assert sync.push(6).ok
    assert "resume" in parts.journal.calls


def test_a_failed_canary_pauses_again(parts: Parts) -> None:
    parts.canary_max = 1e-3
    sync = parts.sync()
    sync.connect()
    parts.journal.calls.clear()
    certificate = sync.push(5)
    assert not certificate.ok
    assert parts.journal.calls == ["pause", "push 5", "commit", "resume", "canary 5", "pause"]


def test_an_engine_that_reports_another_version_is_not_certified(parts: Parts) -> None:
    parts.engines.reported = 0
    sync = parts.sync()
    sync.connect()
    certificate = sync.push(5)
    assert (certificate.engine_versions, certificate.ok) == ((0,), False)
    assert "resume" not in parts.journal.calls


def test_missing_rank_is_named_and_nothing_is_connected(parts: Parts) -> None:
    parts.ranks.absent = True
    sync = parts.sync()
    with pytest.raises(DeadlineExceeded, match=r"trainer rank 1 \(of 2\).*deadlines.barrier_s"):
        sync.connect()
    assert parts.journal.calls == ["ranks arrive"]
    with pytest.raises(WeightSyncError, match="push before connect"):
        sync.push(0)


def test_a_failed_transfer_leaves_engines_paused(parts: Parts) -> None:
    sync = parts.sync()
    sync.connect()
    parts.ranks.failure = RankFailure("trainer rank 1: died")
    parts.journal.calls.clear()
    with pytest.raises(RankFailure):
        sync.push(5)
    assert parts.journal.calls == ["pause", "push 5"]


def test_sleeping_engines_wake_to_a_push_and_serve_once_it_is_certified(parts: Parts) -> None:
    sync = parts.sync()
    sync.connect()
    sync.push(5)
    parts.journal.calls.clear()
    sync.release()
    sync.release()
    assert parts.journal.calls == ["pause", "sleep"], "a second release changes nothing"
    assert sync.push(6).ok
    assert parts.journal.calls == ["pause", "sleep", "wake", "push 6", "commit", "resume"]


def test_engines_that_woke_to_a_bad_transfer_stay_closed_and_awake(parts: Parts) -> None:
    """trl 5312: weights that got lost in sleep must not be sampled from, whatever the push brought."""
    sync = parts.sync()
    sync.connect()
    sync.release()
    parts.engines.receipt = replace(RECEIPT, unloaded=("norm",))
    parts.journal.calls.clear()
    assert not sync.push(5).ok
    assert parts.journal.calls == ["wake", "push 5", "commit"]
    parts.engines.receipt = RECEIPT
    assert sync.push(6).ok
    assert parts.journal.calls.count("wake") == 1


def test_connecting_twice_is_an_error(parts: Parts) -> None:
    sync = parts.sync()
    sync.connect()
    with pytest.raises(WeightSyncError, match="already connected"):
        sync.connect()
