"""The certificate of a push through CUDA IPC, against everything that can go wrong on its way. Trainer and engine are
those of `test_engine_gpu`: one in this process, the other in a Ray actor on the same card."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import grpo_lib.algo.checksum as formula
from grpo_lib.algo.checksum import tensor_checksums
from grpo_lib.config import WeightSyncConfig
from grpo_lib.types import CanaryResult
from grpo_lib.weight_sync.gloo_channel import WireTensor
from grpo_lib.weight_sync.ipc_channel import IpcSender
from grpo_lib.weight_sync.sender import open_backend
from grpo_lib.weight_sync.sync import CertifiedWeightSync
from tests.gpu.test_engine_gpu import DEADLINES, LocalRank, Stack, stack  # noqa: F401 the fixture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NAME = "model.layers.1.mlp.down_proj.weight"
MIB = 1 << 20


def in_torch(tensor: torch.Tensor) -> int:
    return int(formula._checksum(formula._bits(tensor.cpu()))) % 2**64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int8])
def test_the_kernels_checksums_are_those_of_a_cpu(dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = [(1,), (1000, 1111), (1 << 20,), ((1 << 20) + 1,), (5 << 20,), (0,), (2560,), (9, 1 << 20)]
    tensors = [(10 * torch.randn(size, generator=generator, device="cuda")).to(dtype) for size in sizes]
    tensors += [tensors[4][3:], tensors[1][:, :7]]  # at an odd address; not contiguous
    assert tensor_checksums(tensors) == [in_torch(tensor) for tensor in tensors]
    assert tensor_checksums(tensors[4:5]) == [in_torch(tensors[4])]


def test_one_flipped_bit_anywhere_changes_the_kernels_checksum() -> None:
    values = torch.zeros(3 << 20, dtype=torch.bfloat16, device="cuda")
    bits = values.view(torch.int16)
    (before,) = tensor_checksums([values])
    for place in (0, 2047, 2048, (1 << 20) - 1, 1 << 20, (3 << 20) - 1):
        for bit in (0, 7, 15):
            bits[place] ^= -(1 << 15) if bit == 15 else 1 << bit
            assert tensor_checksums([values]) != [before], (place, bit)
            bits[place] ^= -(1 << 15) if bit == 15 else 1 << bit
    assert tensor_checksums([values]) == [before]


class Between:
    """Passes calls on to the engines; `spoil` may change what an update says or what lies in the areas."""

    def __init__(self, client: Any, spoil: Callable[[IpcSender, dict[str, Any]], None]) -> None:
        self._client, self._spoil = client, spoil
        self.channel: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._spoil(self.channel, update_info)
        torch.cuda.synchronize()
        self._client.update_weights(update_info)


def spoiled(spoil: Callable[[IpcSender, dict[str, Any]], None]) -> Callable[..., Any]:
    """A channel that goes wrong after the sender has taken its checksums and filled its area."""

    def open_channel(*, client: Any, **options: Any) -> Any:
        between: Any = Between(client, spoil)
        between.channel = open_backend(client=between, **options)
        return between.channel

    return open_channel


def flip_a_bit(channel: IpcSender, info: dict[str, Any]) -> None:
    if NAME in info["names"]:
        start = info["starts"][info["names"].index(NAME)]
        channel._areas[info["area"]][start + 14] ^= 1


def call_it_float16(channel: IpcSender, info: dict[str, Any]) -> None:
    if NAME in info["names"]:
        info["dtype_names"][info["names"].index(NAME)] = "float16"


def point_elsewhere(channel: IpcSender, info: dict[str, Any]) -> None:
    if NAME in info["names"]:
        info["starts"][info["names"].index(NAME)] += 256


def leave_out(channel: IpcSender, info: dict[str, Any]) -> None:
    if NAME in info["names"]:
        index = info["names"].index(NAME)
        for column in ("names", "dtype_names", "shapes", "starts"):
            del info[column][index]


@pytest.mark.parametrize("spoil", [flip_a_bit, call_it_float16, point_elsewhere, leave_out])
def test_what_goes_wrong_on_the_way_is_named(stack: Stack, spoil: Any) -> None:  # noqa: F811
    certificate = stack.sync(spoiled(spoil)).push(stack.trainer.policy_version)
    assert not certificate.ok
    assert certificate.mismatched == (NAME,)
    assert stack.sync().push(stack.trainer.policy_version).ok


def test_a_root_parameter_that_is_skipped_on_the_way_is_named(stack: Stack) -> None:  # noqa: F811
    """The sender has summed it and says that it went out."""

    class Skipping:
        def __init__(self, weights: Any) -> None:
            self._weights = weights

        def __getattr__(self, name: str) -> Any:
            return getattr(self._weights, name)

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return (pair for pair in self._weights if pair[0] != "model.norm.weight")

    def open_channel(*, weights: Any, **options: Any) -> Any:
        skipping: Any = Skipping(weights)
        return open_backend(weights=skipping, **options)

    certificate = stack.sync(open_channel).push(stack.trainer.policy_version)
    assert certificate.mismatched == certificate.unloaded == ("model.norm.weight",)
    assert stack.sync().push(stack.trainer.policy_version).ok


def test_engines_that_hold_a_stale_handle_are_found_out(stack: Stack) -> None:  # noqa: F811
    """The sender's memory moved, and the engines go on reading what is left in the old."""
    channels: list[Any] = []

    def open_channel(**options: Any) -> Any:
        channels.append(open_backend(**options))
        return channels[-1]

    sync = stack.sync(open_channel)
    assert sync.push(stack.trainer.policy_version).ok
    (channel,) = channels
    kept, channel._areas = channel._areas, [torch.empty_like(area) for area in channel._areas]
    stack.trainer.change(70)
    certificate = sync.push(stack.trainer.policy_version)
    assert not certificate.ok
    assert len(certificate.mismatched) == certificate.num_tensors
    channel._areas = kept
    assert sync.push(stack.trainer.policy_version).ok


def test_vllms_general_way_of_loading_is_certified_and_heard_too(stack: Stack) -> None:  # noqa: F811
    """As it is for quantised models: tensors are kept until their layer is complete."""
    stack.one("load_layerwise", True)
    try:
        sync = stack.sync(small_areas)
        for seed in (80, 81):
            stack.trainer.change(seed)
            certificate = sync.push(stack.trainer.policy_version)
            assert certificate.ok, certificate
    finally:
        stack.one("load_layerwise", False)
    assert stack.sync().push(stack.trainer.policy_version).ok


def small_areas(*, backend: str, rank: int, client: Any, weights: Any, **_: Any) -> IpcSender:
    """As small as the largest tensor, so that both are used in turn."""
    assert backend == "ipc"
    announced = [WireTensor.parse(e.name, e.dtype, e.shape) for e in weights.manifest().entries]
    return IpcSender(client=client, announced=announced, weights=weights, rank=rank, area_bytes=1)


def test_a_hundred_pushes_leave_no_memory_behind(stack: Stack) -> None:  # noqa: F811
    sync = CertifiedWeightSync(
        ranks=LocalRank(stack.trainer, small_areas),
        engines=stack.engines,
        config=WeightSyncConfig(backend="ipc", canary_every=1000),
        deadlines=DEADLINES,
        canary=lambda version: CanaryResult(num_tokens=1, max_abs=0.0, mean_abs=0.0, tolerance=1.0, seconds=0.0),
    )
    sync.connect()
    free: list[int] = []
    for push in range(100):
        with torch.no_grad():
            for parameter in stack.trainer.model.parameters():
                parameter.neg_()  # every bit pattern moves, and an even number of times gives the model back
        stack.trainer.policy_version += 1
        assert sync.push(stack.trainer.policy_version).ok
        if push in (9, 99):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            free.append(torch.cuda.mem_get_info()[0])
    assert free[1] > free[0] - 16 * MIB, f"{(free[0] - free[1]) / MIB:.0f} MiB more after 90 pushes"
    assert stack.sync().push(stack.trainer.policy_version).ok, "and the canary hears the last one"
