"""Every transfer backend is driven in one convention: `cpu_gloo` through vLLM's factories for real, `nccl` and `ipc` up
to the point where a GPU is needed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.weight_transfer import ModuleSource, WeightTransferEngineFactory, WeightTransferTrainerFactory

from grpo_lib.weight_sync import transfer_backends
from grpo_lib.weight_sync.gloo_transfer import GlooReceiver, GlooTrainerInitInfo, register
from grpo_lib.weight_sync.sender import WeightSender
from grpo_lib.weight_sync.transfer_backends import StatelessSender
from tests.unit.test_weight_sync_channel import Receiver
from tests.unit.test_weight_sync_sender import Trainer, weights


class Client:
    """Journals what the inference side is told."""

    num_receivers = 3

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def sender_address(self) -> str:
        return "10.0.0.7"

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.calls.append(("init", init_info))

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self.calls.append(("update", update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append("finish")

    def shutdown_weight_transfer_engine(self) -> None:
        self.calls.append("shutdown")


ANNOUNCED = {
    "names": ["embed", "layer.0", "norm"],
    "dtype_names": ["float32", "bfloat16", "float32"],
    "shapes": [[6, 4], [4, 4], [4]],
}


def connected(backend: str, rank: int = 0) -> tuple[WeightSender, Client]:
    client, trainer = Client(), Trainer()
    partial: Any = trainer
    sender = WeightSender(partial, backend=backend, rank=rank)
    sender.connect(client, timeout_s=5.0)
    return sender, client


# -- cpu_gloo ----------------------------------------------------------------------------------------------------------


def test_registering_twice_changes_nothing() -> None:
    register()
    register()
    assert WeightTransferEngineFactory._registry["cpu_gloo"]() is GlooReceiver


def test_a_trainer_written_for_vllms_factory_can_use_cpu_gloo() -> None:
    register()
    module = torch.nn.Linear(3, 5)
    receiver = Receiver()
    info = GlooTrainerInitInfo(master_address="127.0.0.1", master_port=0, world_size=2, timeout_s=20.0, rank=0)
    client: Any = receiver
    engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(module))
    engine.send_weights()
    (received,) = receiver.updates
    assert received.keys() == {"weight", "bias"}
    assert torch.equal(received["weight"], module.weight.detach())
    assert receiver.calls == ["start", "update", "finish"]


def test_a_trainer_of_this_project_sends_over_cpu_gloo_without_vllm() -> None:
    script = """
import sys
from grpo_lib.weight_sync.sender import WeightSender
from tests.unit.test_weight_sync_channel import Receiver
from tests.unit.test_weight_sync_sender import Trainer
receiver = Receiver()
receiver.sender_address = lambda: "127.0.0.1"
sender = WeightSender(Trainer(), backend="cpu_gloo", rank=0)
sender.connect(receiver, timeout_s=20.0)
report = sender.push(2)
assert list(receiver.updates[0]) == list(report.checksums)
assert "vllm" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_its_other_ranks_only_gather() -> None:
    register()
    passes: list[str] = []

    class Source(ModuleSource):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            passes.append("gather")
            return super().__iter__()

    info = GlooTrainerInitInfo(master_address="127.0.0.1", master_port=0, world_size=2, timeout_s=20.0, rank=1)
    client = Client()
    engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=Source(torch.nn.Linear(2, 2)))
    engine.send_weights()
    assert (passes, client.calls) == (["gather"], [])
    with pytest.raises(ValueError, match="needs a WeightSource"):
        WeightTransferTrainerFactory.trainer_init(info, client=client)


# -- vLLM's own backends, as vLLM 0.32 builds them ---------------------------------------------------------------------


@dataclass
class Built:
    """What the factory was asked for, and a channel that sends everything in one update."""

    info: Any
    client: Client
    source: Any

    def send_weights(self) -> None:
        self.client.start_weight_update()
        self.client.update_weights({"names": [name for name, _ in self.source]})
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        self.client.calls.append("closed")


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Built]:
    made: list[Built] = []

    def trainer_init(info: Any, *, client: Any, source: Any) -> Built:
        made.append(Built(info, client, source))
        return made[-1]

    monkeypatch.setattr(WeightTransferTrainerFactory, "trainer_init", trainer_init)
    return made


@pytest.mark.parametrize("backend", ["nccl", "ipc"])
def test_vllms_engines_get_their_init_info_and_our_checked_weights(backend: str, built: list[Built]) -> None:
    sender, client = connected(backend)
    (channel,) = built
    assert (channel.info.backend, channel.info.rank, channel.info.is_sender) == (backend, 0, True)
    if backend == "nccl":
        assert (channel.info.master_address, channel.info.world_size) == ("10.0.0.7", 4)
        assert 0 < channel.info.master_port < 65536
    metadata = [
        (meta.name, str(meta.dtype).removeprefix("torch."), list(meta.shape)) for meta in channel.source.metadata()
    ]
    assert metadata == list(zip(*ANNOUNCED.values(), strict=True))
    report = sender.push(2)
    assert client.calls == ["start", ("update", {"names": ANNOUNCED["names"]}), "finish"]
    assert list(report.checksums) == ANNOUNCED["names"], "recorded as vLLM's engine pulled them"
    sender.close()
    assert client.calls[-1] == "closed"


def test_every_rank_of_ipc_builds_an_engine_and_only_rank_0_of_nccl(built: list[Built]) -> None:
    connected("ipc", rank=1)
    assert [channel.info.is_sender for channel in built] == [False]
    connected("nccl", rank=1)
    assert len(built) == 1


def test_unknown_backend_is_named() -> None:
    with pytest.raises(ValueError, match=r"'rdma' is none of cpu_gloo, nccl, ipc"):
        connected("rdma")


# -- and as vLLM 0.26 needs them driven --------------------------------------------------------------------------------


def test_stateless_nccl_announces_before_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    journal: list[Any] = []

    class Engine:
        @staticmethod
        def trainer_init(rendezvous: dict[str, Any]) -> str:
            journal.append(rendezvous)
            return "group"

        @staticmethod
        def trainer_send_weights(pairs: Iterator[tuple[str, torch.Tensor]], args: dict[str, Any]) -> None:
            journal.append((args, [name for name, _ in pairs]))

    monkeypatch.setattr(transfer_backends, "nccl_engine", SimpleNamespace(NCCLWeightTransferEngine=Engine))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: journal.append("synchronized"))
    sender, client = connected("nccl")
    ((_, init_info),) = client.calls
    assert init_info == journal[0] | {"rank_offset": 1}
    assert init_info["world_size"] == 4
    report = sender.push(2)
    assert client.calls[1] == "start"
    assert client.calls[2] == ("update", ANNOUNCED | {"packed": True})
    assert client.calls[3] == "finish"
    assert journal[1:] == [({"group": "group", "packed": True}, ANNOUNCED["names"]), "synchronized"]
    assert len(report.checksums) == 3


def test_stateless_ipc_ships_handles_through_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class UpdateInfo:
        names: list[str]
        ipc_handles: list[int]

    class Engine:
        @staticmethod
        def trainer_send_weights(pairs: Iterator[tuple[str, torch.Tensor]], args: dict[str, Any]) -> None:
            args["send_mode"](UpdateInfo([name for name, _ in pairs], [1, 2, 3]))

    monkeypatch.setattr(transfer_backends, "ipc_engine", SimpleNamespace(IPCWeightTransferEngine=Engine))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    sender, client = connected("ipc")
    sender.push(2)
    shipped = asdict(UpdateInfo(ANNOUNCED["names"], [1, 2, 3]))
    assert client.calls == [("init", {}), "start", ("update", shipped), "finish"]


def test_stateless_sender_of_another_rank_only_sends() -> None:
    client = Client()
    pulled: list[str] = []
    StatelessSender(
        client=client,
        source=transfer_backends.ManifestSource(transfer_backends.CheckedWeights(Trainer())),  # type: ignore[arg-type]  # a fake
        is_sender=False,
        send=lambda pairs: pulled.extend(name for name, _ in pairs),
        announcement=None,
        synchronize=lambda: None,
    ).send_weights()
    assert (pulled, client.calls) == (list(weights()), [])
