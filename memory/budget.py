"""Memory that new allocations may take, and errors for those that do not fit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import psutil

from steadyrl.core.errors import MemoryBudgetError
from steadyrl.memory.bounds import Bound, Bounds, margin_of
from steadyrl.memory.process import MB, readable

if TYPE_CHECKING:
    import torch

# What learning takes besides the buffers: libraries, machine code, activations, evaluation. The use
# of a control group rises by 77 MB for DQN on CartPole (the process's own by 40, as on MinAtar;
# PPO's by 25). Atari's images and large networks take more.
LEARNING_BYTES = 96_000_000
# The same where machine code is compiled, and for evaluations.
TRAINING_BYTES = 2 * LEARNING_BYTES
_RESERVE_FRACTION = 0.05
# An address-space limit (ulimit -v) also counts mapped but untouched memory: libraries loaded later
# (OpenBLAS hangs if it cannot map its buffers), and 72 MB of stack and heap per thread. Training
# and evaluation emulators have one thread per core each.
_MAPPED_LATER_BYTES = 150_000_000
_MAPPED_LATER_BYTES_PER_CORE = 150_000_000
# Of the limit at most, so that small runs start on machines with many cores.
_MAPPED_LATER_FRACTION = 0.25

# Names of parts in messages, where their own (`memory/<name>_mb`) are of no key.
SHOWN = {"curiosity": "RND (agent.rnd)"}

# If no bound can be read, everything is allowed.
_UNKNOWN = Bound("unknown", 1 << 62, 0)


def tightest_bound(device: torch.device | None = None) -> Bound:
    """Return the tightest bound on new allocations on a device (None: host)."""
    if device is not None and device.type == "cuda":
        return _cuda_bound(device)
    bounds = (each if each.shared else _with_later_mappings(each) for each in Bounds().read())
    return min(bounds, key=_below_limit, default=_UNKNOWN)


def available_bytes(device: torch.device | None = None) -> int:
    """Return the bytes that buffers may allocate: free memory minus a reserve for the program."""
    bound = tightest_bound(device)
    free = bound.free if device is not None and device.type == "cuda" else _below_limit(bound)
    return max(0, free - max(LEARNING_BYTES, int(free * _RESERVE_FRACTION)))


def require(
    name: str, nbytes: int, *, unit_bytes: float = 0, device: torch.device | None = None
) -> None:
    """Raise MemoryBudgetError if `nbytes` do not fit; call it before allocating.

    With `unit_bytes` (bytes per unit of capacity) the error names the largest capacity that fits.
    """
    available = available_bytes(device)
    if nbytes <= available:
        return
    if unit_bytes > 0:
        # The next process may find slightly less; rounded down to three digits, easy to type.
        capacity = int(0.99 * available / unit_bytes)
        scale = int(10 ** max(0, len(str(capacity)) - 3))
        advice = f"the largest capacity that fits is {capacity // scale * scale:,}"
    else:
        advice = "make it smaller or give the run more memory"
    raise MemoryBudgetError(
        f"{name} needs {readable(nbytes)} but {readable(available)} are free "
        f"({tightest_bound(device).name}): {advice}"
    )


def enough_for(used: int, least: float = 0) -> str:
    """Return a `memory.limit_mb`, of at least `least` bytes, for a run that holds `used` bytes."""
    enough = max(used + TRAINING_BYTES, least)
    return f"memory.limit_mb={math.ceil(enough / (10 * MB)) * 10}"


def shown(part: str) -> str:
    """Return a part's name as messages show it; tags of metrics have the name itself."""
    return SHOWN.get(part, part)


def memory_plan(
    parts: Mapping[str, int], device: torch.device | None, limit: Bound | None = None
) -> str:
    """Return one line for the log: bytes of `parts`, and what is still available.

    `limit`: one of the run's own, which may leave less.
    """
    listed = "".join(f"{shown(name)} {readable(nbytes)}, " for name, nbytes in parts.items())
    still = "still " if parts else ""
    available, name = available_bytes(), tightest_bound().name
    if limit is not None and limit.free < available:
        available, name = limit.free, limit.name
    free = f"{still}available {readable(available)} ({name})"
    if device is not None and device.type != "cpu":
        free += f" on the host, {readable(available_bytes(device))} on {device}"
    return f"memory plan: {listed}{free}"


def _below_limit(bound: Bound) -> int:
    """Return the bytes left until `memory.limit_mb=auto` ends a run."""
    return max(0, bound.free - margin_of(bound.limit))


def _cuda_bound(device: torch.device) -> Bound:
    import torch  # slow to import, and programs that train nothing look at memory too

    from steadyrl.memory.gpu.limit import limit_of_card

    free, total = torch.cuda.mem_get_info(device)
    # torch's unused cache counts as free.
    allocated = torch.cuda.memory_allocated(device)
    free += torch.cuda.memory_reserved(device) - allocated
    limit = limit_of_card(device, total)
    if limit - allocated < free:
        return Bound(f"memory.cuda_limit_mb, {readable(limit)} on {device}", limit, allocated)
    return Bound(f"{readable(total)} on {device}", total, total - free)


def _with_later_mappings(bound: Bound) -> Bound:
    to_come = _MAPPED_LATER_BYTES + _MAPPED_LATER_BYTES_PER_CORE * (psutil.cpu_count() or 1)
    later = min(to_come, int(_MAPPED_LATER_FRACTION * bound.limit))
    return bound._replace(used=bound.used + later)
