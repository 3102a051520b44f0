"""Errors that a device computes, for a replay on the host: nobody waits for them.

Those of one update set priorities when those of the next are handed in: always exactly one update
late, so that what is drawn does not depend on how fast the device is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class LatePriorities:
    """The ids and errors [B] of the last update, which are on their way."""

    def __init__(self, device: torch.device) -> None:
        self._pins = device.type == "cuda"
        self._arrived = torch.cuda.Event() if self._pins else None  # type: ignore[no-untyped-call]
        self._error = torch.empty(0)  # [B] where they arrive
        self._index: NDArray[np.int64] = np.empty(0, np.int64)
        self._same: NDArray[np.bool_] = np.empty(0, np.bool_)  # the id still means what was drawn

    def swap(self, index: NDArray[np.int64], error: Tensor) -> tuple[NDArray, NDArray]:
        """Take in these, and return those before them, of transitions that are still there."""
        before = self._read()
        if self._error.shape != error.shape or self._error.dtype != error.dtype:
            self._error = torch.empty(error.shape, dtype=error.dtype, pin_memory=self._pins)
        self._error.copy_(error.detach(), non_blocking=True)
        if self._arrived is not None:
            self._arrived.record(torch.cuda.current_stream(error.device))
        self._index, self._same = index.copy(), np.ones(len(index), np.bool_)
        return before

    def forget(self, dead: NDArray[np.int64]) -> None:
        """Leave transitions out that are gone: their ids will be those of others."""
        if len(self._index):
            self._same &= ~np.isin(self._index, dead)

    def clear(self) -> None:
        """Forget all."""
        self._index, self._same = self._index[:0], self._same[:0]

    def state_dict(self) -> dict[str, Any]:
        """Return what is on its way, once it is there."""
        index, error = self._read()
        return {"index": torch.from_numpy(index), "error": torch.from_numpy(error)}

    def _read(self) -> tuple[NDArray, NDArray]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._index[self._same], self._error.numpy()[: len(self._index)][self._same]
