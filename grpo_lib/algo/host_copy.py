"""Numbers of a device for the host, without waiting for what the device is given to do after them."""

from __future__ import annotations

import torch


class HostCopy:
    """A tensor's values on the CPU, on their way from the moment this is made.

    Reading waits for the work that was queued until then and for nothing behind it: a device goes on with a backward
    pass while the host looks at the forward's results.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy = tensor.detach().to("cpu", non_blocking=True)  # into pinned memory
        self._arrived = torch.cuda.Event() if tensor.is_cuda else None
        if self._arrived is not None:
            self._arrived.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> torch.Tensor:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy
