"""Priority updates of a host replay whose TD errors are computed on a device.

The TD errors are copied asynchronously. Those of one update set priorities when the next update
hands in its own: always exactly one update late, so sampling does not depend on the device's speed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class DelayedPriorities:
    """Ids and TD errors [B] of the last update, being copied to the host."""

    def __init__(self, device: torch.device) -> None:
        self._pins = device.type == "cuda"
        self._arrived = torch.cuda.Event() if self._pins else None  # type: ignore[no-untyped-call]
        self._error = torch.empty(0)  # [B] pinned destination of the copy
        self._index: NDArray[np.int64] = np.empty(0, np.int64)
        self._unchanged: NDArray[np.bool_] = np.empty(0, np.bool_)  # False: evicted since drawn

    def swap(self, index: NDArray[np.int64], error: Tensor) -> tuple[NDArray, NDArray]:
        """Store these and return the previous ones, without transitions evicted since."""
        before = self._read()
        if self._error.shape != error.shape or self._error.dtype != error.dtype:
            self._error = torch.empty(error.shape, dtype=error.dtype, pin_memory=self._pins)
        self._error.copy_(error.detach(), non_blocking=True)
        if self._arrived is not None:
            self._arrived.record(torch.cuda.current_stream(error.device))
        self._index, self._unchanged = index.copy(), np.ones(len(index), np.bool_)
        return before

    def drop(self, evicted: NDArray[np.int64]) -> None:
        """Drop the errors of evicted transitions: their ids will be reused."""
        if len(self._index):
            self._unchanged &= ~np.isin(self._index, evicted)

    def clear(self) -> None:
        """Drop all errors."""
        self._index, self._unchanged = self._index[:0], self._unchanged[:0]

    def state_dict(self) -> dict[str, Any]:
        """Return ids and errors that are not applied yet; waits for the copy."""
        index, error = self._read()
        return {"index": torch.from_numpy(index), "error": torch.from_numpy(error)}

    def _read(self) -> tuple[NDArray, NDArray]:
        if self._arrived is not None:
            self._arrived.synchronize()
        error = self._error.numpy()[: len(self._index)]
        return self._index[self._unchanged], error[self._unchanged]
