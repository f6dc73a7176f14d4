"""What leaves a trainer is what its manifest says, checked and recorded tensor by tensor, whoever carries it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from grpo_lib.algo.checksum import NamedChecksums
from grpo_lib.errors import PreflightError, WeightSyncError
from grpo_lib.types import Bucket, WeightEntry, WeightManifest
from grpo_lib.weight_sync.sender import CheckedWeights, WeightSender

CLIENT: Any = "client"  # handed through untouched


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "embed": torch.randn(6, 4, generator=generator),
        "layer.0": torch.randn(4, 4, generator=generator).to(torch.bfloat16),
        "norm": torch.randn(4, generator=generator),
    }


@dataclass
class Trainer:
    """Yields `sent` while its manifest describes `declared`."""

    declared: dict[str, torch.Tensor] = field(default_factory=weights)
    sent: dict[str, torch.Tensor] = field(default_factory=weights)
    policy_version: int = 2
    passes: int = 0

    def manifest(self) -> WeightManifest:
        return WeightManifest(
            entries=tuple(
                WeightEntry(name=name, dtype=str(t.dtype).removeprefix("torch."), shape=tuple(t.shape))
                for name, t in self.declared.items()
            )
        )

    def named_weights(self) -> Iterator[Bucket]:
        self.passes += 1
        items = list(self.sent.items())
        yield Bucket(tensors=tuple(items[:2]))
        yield Bucket(tensors=tuple(items[2:]))


@dataclass
class Channel:
    """Takes whatever is sent, as an engine would."""

    weights: CheckedWeights
    arguments: dict[str, Any]
    received: dict[str, torch.Tensor] = field(default_factory=dict)
    closed: bool = False

    def send_weights(self) -> None:
        self.received = dict(self.weights)

    def shutdown(self) -> None:
        self.closed = True


class Opener:
    def __init__(self) -> None:
        self.channels: list[Channel] = []

    def __call__(self, *, weights: CheckedWeights, **arguments: Any) -> Channel:
        self.channels.append(Channel(weights, arguments))
        return self.channels[-1]


def sender(trainer: Trainer, *, rank: int = 0, backend: str = "cpu_gloo") -> tuple[WeightSender, Opener]:
    opener = Opener()
    partial: Any = trainer  # has what a sender needs of a trainer, and no more
    return WeightSender(partial, backend=backend, rank=rank, open_channel=opener), opener


def test_report_describes_the_very_tensors_that_were_sent() -> None:
    trainer = Trainer()
    rank0, opener = sender(trainer)
    rank0.connect(CLIENT, port=0, timeout_s=5.0)
    for version in (2, 3):
        trainer.policy_version = version
        trainer.sent["norm"] = torch.full((4,), float(version))
        report = rank0.push(version)
        (channel,) = opener.channels
        assert list(report.checksums) == ["embed", "layer.0", "norm"]
        received = NamedChecksums()
        received.add(list(channel.received.items()))
        assert report.checksums == received.read()
        assert report.num_bytes == 24 * 4 + 16 * 2 + 4 * 4
        assert report.policy_version == version
    assert channel.arguments == {"backend": "cpu_gloo", "rank": 0, "client": CLIENT, "port": 0, "timeout_s": 5.0}
    rank0.close()
    assert channel.closed


def test_other_ranks_take_part_in_the_gathers_without_a_channel() -> None:
    trainer = Trainer()
    rank1, opener = sender(trainer, rank=1)
    rank1.connect(None, timeout_s=5.0)
    report = rank1.push(2)
    assert trainer.passes == 1
    assert (opener.channels, dict(report.checksums)) == ([], {})


def test_ipc_needs_every_rank() -> None:
    rank1, opener = sender(Trainer(), rank=1, backend="ipc")
    with pytest.raises(WeightSyncError, match="rank 1 sends weights over ipc and needs a client"):
        rank1.connect(None, timeout_s=5.0)
    rank1.connect(CLIENT, timeout_s=5.0)
    assert len(opener.channels) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.sent.pop("norm"), "end before norm"),
        (lambda t: t.declared.pop("norm"), "yields .'norm'.*manifest has None"),
        (lambda t: t.sent.update(norm=t.sent["norm"].double()), "yields .'norm', 'float64'"),
        (lambda t: t.sent.update(norm=torch.zeros(5)), r"\(5,\)"),
        (lambda t: t.sent.update(embed=torch.zeros(4, 6).t()), "embed with strides .*not contiguous"),
    ],
)
def test_a_trainer_that_breaks_its_manifest_is_caught(change: Any, message: str) -> None:
    trainer = Trainer()
    change(trainer)
    rank0, _ = sender(trainer)
    rank0.connect(CLIENT, timeout_s=5.0)
    with pytest.raises(WeightSyncError, match=message):
        rank0.push(2)


def test_wrong_version_and_wrong_order_are_refused() -> None:
    rank0, _ = sender(Trainer())
    with pytest.raises(WeightSyncError, match="rank 0: push before connect"):
        rank0.push(2)
    rank0.connect(CLIENT, timeout_s=5.0)
    with pytest.raises(WeightSyncError, match="asked to send version 3, but its trainer is at 2"):
        rank0.push(3)
    with pytest.raises(WeightSyncError, match="already connected"):
        rank0.connect(CLIENT, timeout_s=5.0)


def test_a_taken_port_is_named_before_anything_is_opened() -> None:
    rank0, opener = sender(Trainer())
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PreflightError, match=rf"weight_sync.port {port} cannot be used.*or 0 for one that is free"):
            rank0.connect(CLIENT, port=port, timeout_s=5.0)
    assert opener.channels == []
