"""Batches made on the host, delivered where they are learned from."""

from __future__ import annotations

import torch
from torch import Tensor

from buffers.batch import ReplayBatch


class Delivery:
    """Hand a batch over: as it is to the CPU, from pinned memory without blocking to CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._copied: torch.cuda.Event | None = None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return host memory to write batches into."""
        return torch.empty(shape, dtype=dtype, pin_memory=self._pinned)

    def before_write(self) -> None:
        """Wait until the last batch has left the memory that the next is written into."""
        if self._copied is not None:
            self._copied.synchronize()

    def deliver(self, batch: ReplayBatch) -> ReplayBatch:
        """Return the batch on the training device; its index stays with the replay."""
        if not self._pinned:
            return batch
        moved = {
            name: part.to(self._device, non_blocking=True)
            for name, part in batch._asdict().items()
            if name != "index"
        }
        if self._copied is None:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record(torch.cuda.current_stream(self._device))
        return batch._replace(**moved)
