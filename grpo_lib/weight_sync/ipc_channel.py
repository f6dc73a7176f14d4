"""The sender of the `ipc` wire: weights are staged in two areas of the card that the engines have opened for good.

Opening another process' memory takes a millisecond for each allocation, so it is done once, when the channel opens.
A push then fills one area while the engines load from the other, and a message says what lies where. The two areas
bound the memory, whatever the model's size, and do not depend on how a trainer keeps its weights. Nothing here needs
vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import reduce_tensor

from grpo_lib.errors import WeightSyncError
from grpo_lib.weight_sync.gloo_channel import WireTensor

VLLM_BACKEND = "cuda_ipc"  # vLLM's own, with one handle for each tensor, has the name `ipc`
_AREA_BYTES = 1 << 30  # or the largest tensor, if that is larger
_ALIGNMENT = 256  # bytes, as of an allocation: kernels may read tensors in vectors


class IpcSender:
    """A rank's side of the handshake and of each update. Every rank has one, for the engines on its card.

    Args:
        client: How to call all engines; only rank 0 does.
        announced: What each pass over `weights` yields; the areas are sized by it.
        weights: (name, tensor) pairs; a fresh pass each time it is iterated.
        area_bytes: Of each of the two areas, if the largest tensor fits.
        device: Of the areas; only tests say "cpu".
        export: Area → (card, what `ipc_transfer` opens it with); only tests replace it.
    """

    def __init__(
        self,
        *,
        client: Any,
        announced: Sequence[WireTensor],
        weights: Iterable[tuple[str, torch.Tensor]],
        rank: int,
        area_bytes: int = _AREA_BYTES,
        device: str = "cuda",
        export: Callable[[torch.Tensor], tuple[str, tuple[Any, ...]]] | None = None,
    ) -> None:
        """Make the areas and have all engines open them."""
        self._client, self._weights, self._is_sender = client, weights, rank == 0
        sizes = [_padded(wire.num_bytes) for wire in announced]
        count = 2 if sum(sizes) > area_bytes else 1
        size = max(*sizes, min(area_bytes, sum(sizes)))
        self._areas = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(count)]
        self._num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        # One thread, so that calls reach the engines in order.
        self._calls = ThreadPoolExecutor(1, thread_name_prefix=VLLM_BACKEND)
        exported = [self._of_all_ranks((export or _exported)(area)) for area in self._areas]
        if self._is_sender:
            client.init_weight_transfer_engine({"areas": exported})

    def send_weights(self) -> None:
        """One round trip: start, an update for each filled area, finish.

        Raises:
            WeightSyncError: a tensor is larger than it was when the channel opened.
        """
        pending = self._call(self._client.start_weight_update)
        for update_info in self._filled_areas():
            self._wait_for_device()
            pending.result()  # the engines are done with the other area, which is filled next
            self._meet()  # every rank has filled this one
            pending = self._call(self._client.update_weights, update_info)
        pending.result()
        self._call(self._client.finish_weight_update).result()

    def shutdown(self) -> None:
        """Engines that still have an area open keep its memory until they let go of it."""
        self._calls.shutdown(wait=False, cancel_futures=True)
        self._areas = []

    def _filled_areas(self) -> Iterator[dict[str, Any]]:
        """Copy the weights, area by area, and say of each what lies in it."""
        index = filled = 0
        names: list[str] = []
        dtype_names: list[str] = []
        shapes: list[list[int]] = []
        starts: list[int] = []

        def update_info() -> dict[str, Any]:
            return {"area": index, "names": names, "dtype_names": dtype_names, "shapes": shapes, "starts": starts}

        for name, tensor in self._weights:
            size = self._areas[index].numel()
            if names and filled + tensor.nbytes > size:
                yield update_info()
                index, filled = (index + 1) % len(self._areas), 0
                names, dtype_names, shapes, starts = [], [], [], []
            if tensor.nbytes > size:
                raise WeightSyncError(f"{name} has {tensor.nbytes} bytes, more than the staging area's {size}")
            target = self._areas[index][filled : filled + tensor.nbytes]
            target.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
            names.append(name)
            dtype_names.append(str(tensor.dtype).removeprefix("torch."))
            shapes.append(list(tensor.shape))
            starts.append(filled)
            filled += _padded(tensor.nbytes)
        if names:
            yield update_info()

    def _call(self, method: Callable[..., None], *args: Any) -> Future[None]:
        """Call all engines in the background; on other ranks than 0, nothing."""
        if self._is_sender:
            return self._calls.submit(method, *args)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _wait_for_device(self) -> None:
        if self._areas[0].is_cuda:
            torch.cuda.current_stream().synchronize()

    def _meet(self) -> None:
        if self._num_ranks > 1:
            dist.barrier()

    def _of_all_ranks(self, exported: tuple[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
        """Card → handle, over all ranks."""
        gathered: list[Any] = [exported] * self._num_ranks
        if self._num_ranks > 1:
            dist.all_gather_object(gathered, exported)
        return dict(gathered)


def card_of(device: torch.device) -> str:
    """The physical GPU's name, the same in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _exported(area: torch.Tensor) -> tuple[str, tuple[Any, ...]]:
    _, arguments = reduce_tensor(area)
    return card_of(area.device), arguments


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
