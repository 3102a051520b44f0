"""What NVML, the library behind nvidia-smi, says of a card; needs the extra `gpu`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class CardUsage(NamedTuple):
    """A card's use by all processes; None: cannot be read."""

    utilization: float | None  # percent of the last second that a kernel was running
    used: int | None  # bytes, of all processes and the driver


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
