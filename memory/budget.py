"""What memory there is, and the refusal of what does not fit in it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import NamedTuple

import psutil
import torch

from memory.cgroup import cgroup_limits
from memory.errors import MemoryBudgetError
from memory.units import readable

# Kept free of buffers for what else a run needs: stacks, libraries, compiled kernels.
_RESERVE_FRACTION = 0.05
_RESERVE_BYTES = 64_000_000
# An address space limit also counts what is only mapped: libraries loaded later (OpenBLAS spins
# for ever when it cannot map its buffers), and 72 MB for the stack and the heap of every thread,
# of which emulators that train and others that evaluate have one per core each.
_UNTOUCHED_BYTES = 150_000_000
_UNTOUCHED_BYTES_PER_CORE = 150_000_000
_UNTOUCHED_SHARE = 0.25  # of the limit at most: with many cores, small runs must still start


class Room(NamedTuple):
    """The tightest bound on new memory: what sets it, and how many bytes are left below it."""

    bound: str
    free: int


def room(device: torch.device | None = None) -> Room:
    """Return the tightest of all bounds that apply to new memory on a device (None = host)."""
    if device is not None and device.type == "cuda":
        return _cuda_room(device)
    rooms = [Room("memory of this machine", psutil.virtual_memory().available)]
    rooms += [Room(f"cgroup limit {readable(c.limit)}", c.free) for c in cgroup_limits()]
    if sys.platform != "win32":
        rooms += _address_space_room()
    return min(rooms, key=lambda candidate: candidate.free)


def available_bytes(device: torch.device | None = None) -> int:
    """Return how much may be allocated, less a small reserve for the program itself."""
    free = room(device).free
    return max(0, free - max(_RESERVE_BYTES, int(free * _RESERVE_FRACTION)))


def require(
    name: str, nbytes: int, *, unit_bytes: float = 0, device: torch.device | None = None
) -> None:
    """Raise MemoryBudgetError if `nbytes` do not fit, before anything is allocated.

    With `unit_bytes` (what one unit of capacity costs) it names the capacity that does fit.
    """
    available = available_bytes(device)
    if nbytes <= available:
        return
    if unit_bytes > 0:
        capacity = _round_down(int(available / unit_bytes))
        advice = f"the largest capacity that fits is {capacity:,}"
    else:
        advice = "make it smaller or give the run more memory"
    raise MemoryBudgetError(
        f"{name} needs {readable(nbytes)} but {readable(available)} are free "
        f"({room(device).bound}): {advice}"
    )


def plan_line(
    parts: Mapping[str, int], device: torch.device | None = None, *, built: bool = False
) -> str:
    """Say what each part takes and what there is, in one line to print before a run.

    Parts that are `built` already are in use, so what is available is what else there is.
    """
    left = available_bytes(device)
    listed = "".join(f"{name} {readable(nbytes)}, " for name, nbytes in parts.items())
    return f"memory plan: {listed}{'still ' if built else ''}available {readable(left)}"


def _cuda_room(device: torch.device) -> Room:
    free, total = torch.cuda.mem_get_info(device)
    # What torch holds in its cache without using it is as good as free to us.
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return Room(f"{readable(total)} on {device}", free + cached)


def _address_space_room() -> list[Room]:
    import resource  # not on Windows

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return []
    to_come = _UNTOUCHED_BYTES + _UNTOUCHED_BYTES_PER_CORE * (psutil.cpu_count() or 1)
    mapped = int(psutil.Process().memory_info().vms)
    free = max(0, limit - mapped - min(to_come, int(_UNTOUCHED_SHARE * limit)))
    return [Room(f"address space limit {readable(limit)}", free)]


def _round_down(count: int) -> int:
    """Keep three digits: a number to type, and on the safe side."""
    scale = int(10 ** max(0, len(str(count)) - 3))
    return (count // scale) * scale
