"""How rank 0 calls all engines during a weight transfer: vLLM's `VLLMWeightSyncClient` over actor handles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from grpo_lib.ray_runtime.actor_group import Pending

_SETTING = "deadlines.weight_sync_s"


class RayWeightClient:
    """Fans every call out to all engines and waits for all of them; travels to rank 0 by pickle.

    Args:
        handles: `Host` actors of the engines.
        labels: How errors call them.
        workers_per_engine: Processes of one engine that each hold a share of the weights.
        deadline_s: Of each call.
    """

    def __init__(
        self, handles: Sequence[Any], labels: Sequence[str], *, workers_per_engine: int, deadline_s: float
    ) -> None:
        self._handles, self._labels = tuple(handles), tuple(labels)
        self._workers_per_engine, self._deadline_s = workers_per_engine, deadline_s

    @property
    def num_receivers(self) -> int:
        return len(self._handles) * self._workers_per_engine

    def sender_address(self) -> str:
        return ray.util.get_node_ip_address()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Join all engines to the channel. Each is an engine of its own and would call itself the first, so engine i
        is given the i-th block of ranks here."""
        offset = init_info.get("rank_offset")
        requests = [
            init_info if offset is None else init_info | {"rank_offset": offset + index * self._workers_per_engine}
            for index in range(len(self._handles))
        ]
        self._call_each("init_weight_transfer_engine", [({"init_info": info},) for info in requests])

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self._call("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The version that vLLM may pass is not used: the driver commits it once the transfer is acknowledged."""
        self._call("finish_weight_update")

    def shutdown_weight_transfer_engine(self) -> None:
        self._call("shutdown_weight_transfer_engine")

    def _call(self, method: str, *args: Any) -> None:
        self._call_each(method, [args] * len(self._handles))

    def _call_each(self, method: str, args_list: Sequence[Sequence[Any]]) -> None:
        refs = {
            handle.invoke.remote(method, *args): label
            for handle, label, args in zip(self._handles, self._labels, args_list, strict=True)
        }
        Pending(method, refs).wait(deadline_s=self._deadline_s, setting=_SETTING)
