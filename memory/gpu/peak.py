"""The peak of a card's allocated memory, for several readers at once.

torch keeps one peak per card: whoever resets it takes it from all others. So it is reset here only.
"""

from __future__ import annotations

import functools
import threading
from weakref import WeakSet

import torch


class PeakReader:
    """The peak allocation since this reader was opened, or since its last `pop`."""

    def __init__(self, owner: _Peak) -> None:
        self._owner = owner
        self.peak = 0  # so far, as of the last reading of any reader

    def read(self) -> int:
        """Return the peak in bytes."""
        return self._owner.read(self)

    def pop(self) -> int:
        """Return the peak in bytes and begin anew with what is allocated now."""
        return self._owner.read(self, restart=True)


class _Peak:
    """Owns torch's peak of one card, and passes it on to every open reader."""

    def __init__(self, card: int) -> None:
        self._card = card
        self._lock = threading.Lock()
        self._readers: WeakSet[PeakReader] = WeakSet()  # one that is dropped needs no closing

    def open(self) -> PeakReader:
        with self._lock:
            self._pass_on()
            reader = PeakReader(self)
            self._readers.add(reader)
            reader.peak = torch.cuda.memory_allocated(self._card)
        return reader

    def read(self, reader: PeakReader, *, restart: bool = False) -> int:
        with self._lock:
            self._pass_on()
            peak = reader.peak
            if restart:
                reader.peak = torch.cuda.memory_allocated(self._card)
        return peak

    def _pass_on(self) -> None:
        peak = torch.cuda.max_memory_allocated(self._card)
        for reader in self._readers:
            reader.peak = max(reader.peak, peak)
        torch.cuda.reset_peak_memory_stats(self._card)


@functools.cache
def _peak_of(card: int) -> _Peak:
    return _Peak(card)


def open_peak(device: torch.device) -> PeakReader:
    """Return a new reader of a card's peak, which begins with what is allocated now."""
    return _peak_of(card_of(device)).open()


def card_of(device: torch.device) -> int:
    """Return the number of a CUDA device; without one, that of the current device."""
    return torch.cuda.current_device() if device.index is None else device.index
