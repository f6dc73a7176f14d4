"""Every transfer backend is driven in one convention: `cpu_gloo` through vLLM's factories for real, `nccl` up to the
point where a GPU is needed, and the receiver of `ipc` with areas in host memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.weight_transfer import ModuleSource, WeightTransferEngineFactory, WeightTransferTrainerFactory

from grpo_lib.errors import WeightSyncError
from grpo_lib.weight_sync import ipc_transfer, transfer_backends
from grpo_lib.weight_sync.gloo_transfer import GlooReceiver, GlooTrainerInitInfo, register
from grpo_lib.weight_sync.ipc_transfer import IpcReceiver, IpcUpdateInfo, is_filled_in_place
from grpo_lib.weight_sync.sender import WeightSender
from tests.unit.test_weight_sync_channel import Receiver
from tests.unit.test_weight_sync_sender import Trainer


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
    assert WeightTransferEngineFactory._registry["cuda_ipc"]() is IpcReceiver


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


def test_vllms_engine_gets_its_init_info_and_our_checked_weights(built: list[Built]) -> None:
    sender, client = connected("nccl")
    (channel,) = built
    assert (channel.info.backend, channel.info.rank, channel.info.is_sender) == ("nccl", 0, True)
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


def test_only_rank_0_of_nccl_builds_an_engine(built: list[Built]) -> None:
    connected("nccl", rank=1)
    assert not built


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


# -- the engine side of ipc --------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """Journals what it is given to load."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, 3))
        self.given: list[tuple[str, torch.Tensor]] = []

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
        self.given += weights
        with torch.no_grad():
            self.weight.copy_(weights[0][1])
        return {"weight"}


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> IpcReceiver:
    """With one area of host memory; a model of this kind is filled in place."""
    monkeypatch.setattr(ipc_transfer, "is_filled_in_place", lambda model: True)
    made = IpcReceiver.__new__(IpcReceiver)  # vLLM makes it with its whole configuration
    made.model, made.device = Model(), torch.device("cpu")
    made._areas = (torch.arange(256, dtype=torch.uint8),)
    return made


def given(receiver: IpcReceiver) -> list[tuple[str, torch.Tensor]]:
    assert isinstance(receiver.model, Model)
    return receiver.model.given


def update(start: int = 16, shape: tuple[int, ...] = (2, 3)) -> IpcUpdateInfo:
    return IpcUpdateInfo(
        area=0, names=["weight"], dtype_names=["float32"], shapes=[list(shape)], starts=[start]
    )  # fmt: skip


def test_an_ipc_receiver_loads_what_lies_in_the_area(receiver: IpcReceiver) -> None:
    receiver.start_weight_update()
    receiver.receive_weights(update())
    receiver.finish_weight_update()
    ((name, tensor),) = given(receiver)
    assert name == "weight"
    assert tensor.flatten().view(torch.uint8).tolist() == list(range(16, 40))
    assert tensor.data_ptr() == receiver._areas[0].data_ptr() + 16, "without a copy"


def test_a_layerwise_reload_keeps_copies(receiver: IpcReceiver) -> None:
    """It holds tensors back until their layer is complete, and by then the sender has filled the area anew."""
    receiver._memory = None
    receiver.receive_weights(update())
    before = given(receiver)[0][1].clone()
    receiver._areas[0].zero_()
    assert given(receiver)[0][1].equal(before)


def test_an_ipc_receiver_refuses_what_it_cannot_have(receiver: IpcReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WeightSyncError, match="ends beyond the area's 256 bytes"):
        receiver.receive_weights(update(start=240))
    monkeypatch.setattr(ipc_transfer, "card_of", lambda device: "GPU-b")
    with pytest.raises(WeightSyncError, match=r"no trainer rank shares card GPU-b .*ranks are on \['GPU-a'\]"):
        receiver.init_transfer_engine(ipc_transfer.IpcInitInfo(areas=[{"GPU-a": ()}]))
    receiver.shutdown()
    with pytest.raises(WeightSyncError, match="before init_weight_transfer_engine"):
        receiver.receive_weights(update())


def test_a_loader_that_replaces_a_parameter_is_caught(receiver: IpcReceiver) -> None:
    receiver.start_weight_update()
    receiver.receive_weights(update())
    receiver.model.weight = torch.nn.Parameter(torch.zeros(2, 3))
    with pytest.raises(WeightSyncError, match=r"Model replaced \['weight'\]"):
        receiver.finish_weight_update()


def test_only_layers_that_leave_their_weights_alone_are_filled_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.platforms import current_platform

    class Layer(torch.nn.Module):
        def __init__(self, quant_method: object) -> None:
            super().__init__()
            self.quant_method = quant_method

    class Repacks(UnquantizedLinearMethod):
        pass

    class Hooked(torch.nn.Module):
        def process_weights_after_loading(self, dtype: torch.dtype) -> None: ...

    plain = UnquantizedLinearMethod.__new__(UnquantizedLinearMethod)
    assert not is_filled_in_place(Layer(plain)), "a CPU packs them"
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    assert is_filled_in_place(Layer(plain))
    assert is_filled_in_place(torch.nn.Linear(2, 2))
    for other in (Layer(Repacks.__new__(Repacks)), Hooked(), torch.nn.Sequential(Layer(plain), Hooked())):
        assert not is_filled_in_place(other)
