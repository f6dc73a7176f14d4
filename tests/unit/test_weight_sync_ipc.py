"""The staging areas between a sender and an engine of this process, in host memory: what arrives, and when an area is
filled anew."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from grpo_lib.errors import WeightSyncError
from grpo_lib.weight_sync.gloo_channel import WireTensor
from grpo_lib.weight_sync.ipc_channel import IpcSender

WAIT_S = 20.0


def tensors() -> list[tuple[str, torch.Tensor]]:
    """Several dtypes, a scalar, an empty one, and sizes that are no multiple of the alignment."""
    generator = torch.Generator().manual_seed(0)
    return [
        ("a", torch.randn(3, 5, generator=generator)),
        ("b", torch.randn(70, generator=generator).to(torch.bfloat16)),
        ("none", torch.zeros(0, 4)),
        ("scalar", torch.tensor(3.5, dtype=torch.float64)),
        ("nan", torch.tensor([float("nan"), -0.0, float("inf")])),
        ("c", torch.randn(40, 4, generator=generator)),
    ]


class Engine:
    """Reads what lies in the areas; `during` runs inside the update of that number, before anything is read."""

    def __init__(self) -> None:
        self.areas: list[torch.Tensor] = []
        self.calls: list[str] = []
        self.received: dict[str, torch.Tensor] = {}
        self.during: dict[int, Callable[[], None]] = {}

    def export(self, area: torch.Tensor) -> tuple[str, tuple[Any, ...]]:
        return "card", (area,)

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self.areas = [area["card"][0] for area in info["areas"]]

    def start_weight_update(self) -> None:
        self.calls.append("start")
        self.received = {}

    def update_weights(self, info: dict[str, Any]) -> None:
        number = len(self.calls) - 1
        self.calls.append("update")
        self.during.get(number, lambda: None)()
        fields = zip(info["names"], info["dtype_names"], info["shapes"], info["starts"], strict=True)
        for name, dtype_name, shape, start in fields:
            wire = WireTensor.parse(name, dtype_name, shape)
            bits = self.areas[info["area"]][start : start + wire.num_bytes]
            self.received[name] = bits.view(wire.dtype).view(wire.shape).clone()

    def finish_weight_update(self) -> None:
        self.calls.append("finish")


def opened(engine: Engine, weights: Any, area_bytes: int, *, rank: int = 0) -> IpcSender:
    wires = [WireTensor(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape)) for name, tensor in tensors()]
    return IpcSender(
        client=engine, announced=wires, weights=weights, rank=rank, area_bytes=area_bytes, device="cpu",
        export=engine.export,
    )  # fmt: skip


@pytest.mark.parametrize(("area_bytes", "areas", "updates"), [(1 << 20, 1, 1), (1024, 2, 2), (1, 2, 3)])
def test_bits_arrive_unchanged_push_after_push(area_bytes: int, areas: int, updates: int) -> None:
    engine, weights = Engine(), tensors()
    sender = opened(engine, weights, area_bytes)
    assert len(engine.areas) == areas
    for value in (1.0, 2.0, 3.0):
        weights[0][1].fill_(value)
        engine.calls.clear()
        sender.send_weights()
        assert engine.calls == ["start", *["update"] * updates, "finish"]
        assert list(engine.received) == [name for name, _ in weights]
        for name, tensor in weights:
            arrived = engine.received[name]
            assert (arrived.dtype, arrived.shape) == (tensor.dtype, tensor.shape)
            assert arrived.reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8)), name


def test_areas_bound_the_memory_and_begin_where_vectors_may_be_read() -> None:
    engine = Engine()
    opened(engine, tensors(), 1024)
    assert [area.numel() for area in engine.areas] == [1024, 1024]
    engine = Engine()
    opened(engine, tensors(), 1)
    assert [area.numel() for area in engine.areas] == [768, 768], "640 bytes are the largest tensor"


def test_the_next_area_is_filled_while_engines_load_and_the_first_not_before_they_are_done() -> None:
    """Areas of 768 bytes: `nan` lies in the second, and `c` over the first."""
    engine, second_begun, first_filled_anew = Engine(), threading.Event(), threading.Event()

    class Weights:
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors():
                if name == "nan":
                    second_begun.set()
                yield name, tensor
            first_filled_anew.set()

    def slowly() -> None:
        assert second_begun.wait(WAIT_S), "the sender waits for the engines before it fills the other area"
        assert not first_filled_anew.wait(0.2), "the area is overwritten under the engines"

    engine.during[0] = slowly
    opened(engine, Weights(), 512).send_weights()
    assert engine.calls == ["start", "update", "update", "update", "finish"]
    assert engine.received["a"].equal(tensors()[0][1])


def test_an_engine_that_fails_ends_the_push() -> None:
    engine = Engine()

    def fail() -> None:
        raise MemoryError("no room")

    engine.during[0] = fail
    sender = opened(engine, tensors(), 512)
    with pytest.raises(MemoryError, match="no room"):
        sender.send_weights()
    assert "finish" not in engine.calls
    sender.shutdown()


def test_a_tensor_that_outgrew_the_areas_is_named() -> None:
    engine, weights = Engine(), tensors()
    sender = opened(engine, weights, 1)
    weights[-1] = ("c", torch.zeros(4096))
    with pytest.raises(WeightSyncError, match=r"c has 16384 bytes, more than the staging area's 768"):
        sender.send_weights()


def test_other_ranks_fill_areas_and_call_nobody() -> None:
    engine = Engine()
    sender = opened(engine, tensors(), 512, rank=1)
    sender.send_weights()
    assert (engine.areas, engine.calls) == ([], [])
