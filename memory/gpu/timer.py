"""The time of a block on a card, by two events: nothing waits until it is read."""

from __future__ import annotations

import torch


class DeviceTimer:
    """Time between two points of a card's work, idle time in between included."""

    def __init__(self, device: torch.device) -> None:
        """Start, on the current stream."""
        self._device = device
        self._start = self._record()
        self._end: torch.cuda.Event | None = None

    def stop(self) -> None:
        """Stop, on the current stream."""
        self._end = self._record()

    def is_over(self) -> bool:
        """Return whether the card has done the block's work; does not wait."""
        return self._end is not None and bool(self._end.query())

    def seconds(self) -> float:
        """Return the seconds on the card, once its work is done: this waits for it."""
        if self._end is None:
            return 0.0
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1e3

    def _record(self) -> torch.cuda.Event:
        with torch.cuda.device(self._device):
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return event
