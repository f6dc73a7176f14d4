"""The gloo wire between two threads of this process: bytes arrive unchanged, and nobody waits for ever."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] documented API

from grpo_lib.errors import WeightSyncError
from grpo_lib.weight_sync import gloo_channel
from grpo_lib.weight_sync.gloo_channel import GlooChannel, GlooSender, WireTensor


def tensors() -> list[tuple[str, torch.Tensor]]:
    """Sizes that are no multiple of the alignment, several dtypes, an empty one and a scalar."""
    generator = torch.Generator().manual_seed(0)
    return [
        ("a", torch.randn(3, 5, generator=generator)),
        ("b", torch.randn(7, generator=generator).to(torch.bfloat16)),
        ("none", torch.zeros(0, 4)),
        ("scalar", torch.tensor(3.5, dtype=torch.float64)),
        ("nan", torch.tensor([float("nan"), -0.0, float("inf")])),
        ("c", torch.randn(40, 2, generator=generator)),
    ]


def announced(pairs: list[tuple[str, torch.Tensor]]) -> list[WireTensor]:
    return [WireTensor(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape)) for name, tensor in pairs]


class Receiver:
    """An engine's side of the calling convention, in a thread of the sender's client."""

    num_receivers = 1

    def __init__(self) -> None:
        self.channel: GlooChannel | None = None
        self.updates: list[dict[str, torch.Tensor]] = []
        self.calls: list[str] = []
        self.failure: Exception | None = None

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        timeout = timedelta(seconds=info["timeout_s"])
        store = TCPStore(info["master_address"], info["master_port"], is_master=False, timeout=timeout)
        self.channel = GlooChannel(store, info["rank_offset"], info["world_size"], timeout)

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, info: dict[str, Any]) -> None:
        if self.failure is not None:
            raise self.failure
        assert self.channel is not None
        fields = zip(info["names"], info["dtype_names"], info["shapes"], strict=True)
        self.updates.append(dict(self.channel.receive([WireTensor.parse(*field) for field in fields])))
        self.calls.append("update")

    def finish_weight_update(self) -> None:
        self.calls.append("finish")


def connect(receiver: Receiver, pairs: list[tuple[str, torch.Tensor]], timeout_s: float = 20.0) -> GlooSender:
    return GlooSender(
        client=receiver,
        announced=lambda: announced(pairs),
        weights=pairs,
        address="127.0.0.1",
        port=0,
        num_receivers=1,
        timeout_s=timeout_s,
    )


@pytest.mark.parametrize("chunk_bytes", [1, 64, 2**20])
def test_bits_dtypes_and_shapes_arrive(chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_channel, "_CHUNK_BYTES", chunk_bytes)
    pairs, receiver = tensors(), Receiver()
    sender = connect(receiver, pairs)
    for value in (1.0, 2.0):
        pairs[0][1].fill_(value)
        sender.send_weights()
        received = receiver.updates[-1]
        assert list(received) == [name for name, _ in pairs]
        for name, tensor in pairs:
            assert (received[name].dtype, received[name].shape) == (tensor.dtype, tensor.shape)
            sent_bytes, got_bytes = (t.contiguous().view(-1).view(torch.uint8) for t in (tensor, received[name]))
            assert torch.equal(sent_bytes, got_bytes), "raw bits: NaN and -0.0 included"
    assert receiver.calls == ["start", "update", "finish"] * 2
    assert receiver.updates[0]["a"][0, 0] == 1.0, "an earlier update's tensors are not overwritten by a later one"


def test_chunks_hold_whole_tensors_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_channel, "_CHUNK_BYTES", 64)
    sizes = {"a": 4, "b": 8, "huge": 100, "c": 1, "d": 16}  # float32 elements, padded to 16 bytes
    wires = [WireTensor(name=name, dtype=torch.float32, shape=(count,)) for name, count in sizes.items()]
    chunks = [[wire.name for wire in chunk] for chunk in gloo_channel._chunks(wires)]
    assert chunks == [["a", "b"], ["huge"], ["c"], ["d"]]


def test_a_receiver_that_gives_up_ends_the_send_at_once() -> None:
    pairs, receiver = tensors(), Receiver()
    sender = connect(receiver, pairs)
    receiver.failure = ValueError("engine 0 ran out of memory")
    started = time.monotonic()
    with pytest.raises(ValueError, match="ran out of memory"):
        sender.send_weights()
    assert time.monotonic() - started < 5
    assert receiver.calls == ["start"], "a failed update is not finished"


def test_a_sender_that_goes_away_is_noticed_at_the_deadline() -> None:
    pairs, receiver = tensors(), Receiver()
    sender = connect(receiver, pairs, timeout_s=1.0)
    assert receiver.channel is not None
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"broadcast of a … c .*failed within 1 s.*deadlines.weight_sync_s"):
        list(receiver.channel.receive(announced(pairs)))
    assert time.monotonic() - started < 10
    del sender


def test_a_member_that_never_joins_ends_the_handshake() -> None:
    class Absent(Receiver):
        def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
            del info

    started = time.monotonic()
    with pytest.raises(WeightSyncError, match="rank 0 of 2 could not join within 1 s"):
        connect(Absent(), tensors(), timeout_s=1.0)
    assert time.monotonic() - started < 15


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda pairs: pairs.pop(), "announced .*name='c'.*got nothing"),
        (lambda pairs: pairs.append(("extra", torch.zeros(1))), "yields extra, which it did not announce"),
        (lambda pairs: pairs.__setitem__(1, ("b", torch.zeros(7))), r"got b torch.float32 \(7,\)"),
        (lambda pairs: pairs.reverse(), "got c"),
    ],
)
def test_tensors_other_than_the_announced_ones_are_refused(change: Any, message: str) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    channel = GlooChannel(store, 0, 1, timedelta(seconds=5))  # alone: only the sender's own checks are of interest
    pairs = tensors()
    wires = announced(pairs)
    change(pairs)
    receiving: Future[None] = Future()
    receiving.set_result(None)
    with pytest.raises(WeightSyncError, match=message):
        channel.send(wires, pairs, receiving)


def test_two_receivers_get_the_same_bytes() -> None:
    pairs, first, second = tensors(), Receiver(), Receiver()

    class Both(Receiver):
        def _each(self, method: str, *args: Any) -> None:
            with ThreadPoolExecutor(2) as pool:
                for call in [pool.submit(getattr(r, method), *args) for r in (first, second)]:
                    call.result()

        def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
            threads = [
                threading.Thread(target=r.init_weight_transfer_engine, args=(info | {"rank_offset": rank},))
                for rank, r in enumerate((first, second), start=1)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        def update_weights(self, info: dict[str, Any]) -> None:
            self._each("update_weights", info)

    GlooSender(
        client=Both(), announced=lambda: announced(pairs), weights=pairs,
        address="127.0.0.1", port=0, num_receivers=2, timeout_s=20.0,
    ).send_weights()  # fmt: skip
    for name, tensor in pairs:
        for receiver in (first, second):
            assert torch.equal(receiver.updates[0][name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
