"""Use of the run's card: torch's allocator, and NVML for all processes (extra `gpu`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from steadyrl.memory.gpu.peak import open_peak
from steadyrl.memory.process import MB
from steadyrl.memory.throttled_reading import ThrottledReading


class CardUsage(NamedTuple):
    """A card's use by all processes; None: cannot be read."""

    utilization: float | None  # percent of the last second that a kernel was running
    used: int | None  # bytes, of all processes and the driver


class CardReading(NamedTuple):
    """Bytes of torch's allocator, and how often it had to free its cache for an allocation."""

    allocated: int
    reserved: int
    peak: int  # allocated at most since the last reading
    retries: int  # since the start
    usage: CardUsage

    def scalars(self) -> dict[str, float]:
        """Return the reading as TensorBoard tags and values."""
        scalars = {
            "memory/cuda_allocated_mb": self.allocated / MB,
            "memory/cuda_reserved_mb": self.reserved / MB,
            "memory/cuda_peak_mb": self.peak / MB,
            "memory/cuda_alloc_retries": float(self.retries),
        }
        if self.usage.used is not None:
            scalars["memory/cuda_used_mb"] = self.usage.used / MB
        if self.usage.utilization is not None:
            scalars["memory/cuda_utilization_percent"] = self.usage.utilization
        return scalars


class CardMonitor:
    """Reads torch's allocator at every call, NVML less often."""

    def __init__(
        self, device: torch.device, every_seconds: float, clock: Callable[[], float]
    ) -> None:
        self._device, self._every, self._clock = device, every_seconds, clock
        self._since_last = open_peak(device)
        self._usage: ThrottledReading[CardUsage] | None = None
        self.peak: int | None = None  # bytes allocated at most, as of the last reading

    def allocated(self) -> int:
        """Return the bytes that torch holds on the card."""
        return torch.cuda.memory_allocated(self._device)

    def read(self) -> CardReading:
        """Return a reading; peaks are those since the last one."""
        stats, peak = torch.cuda.memory_stats(self._device), self._since_last.pop()
        self.peak = max(self.peak or 0, peak)
        return CardReading(
            stats["allocated_bytes.all.current"],
            stats["reserved_bytes.all.current"],
            peak,
            stats["num_alloc_retries"],
            self._read_usage(),
        )

    def _read_usage(self) -> CardUsage:
        if self._usage is None:
            read = partial(read_usage, self._device)
            self._usage = ThrottledReading(read, self._every, self._clock)
        else:
            self._usage.poll()
        return self._usage.value


def read_usage(device: torch.device) -> CardUsage:
    """Return the use of a card; on a part of one (MIG) NVML gives no utilisation."""
    utilization = _read(lambda: torch.cuda.utilization(device))
    used = _read(lambda: torch.cuda.device_memory_used(device))
    return CardUsage(utilization, used if used is None else int(used))


def _read(read: Callable[[], float]) -> float | None:
    try:
        return read()
    # pynvml may be missing, and its errors derive from nothing else; a broken driver gives others.
    except Exception:
        return None
