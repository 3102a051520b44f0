"""Available memory, including cgroup limits, and errors for allocations that do not fit."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import psutil
import torch

from steadyrl.core.errors import MemoryBudgetError
from steadyrl.memory.gpu.limit import limit_of_card
from steadyrl.memory.process import UNREADABLE, readable

# Reserved for everything but buffers: stacks, libraries, compiled kernels.
_RESERVE_FRACTION = 0.05
_RESERVE_BYTES = 64_000_000
# An address-space limit (ulimit -v) also counts mapped but untouched memory: libraries loaded later
# (OpenBLAS hangs if it cannot map its buffers), and 72 MB of stack and heap per thread. Training
# and evaluation emulators have one thread per core each.
_MAPPED_LATER_BYTES = 150_000_000
_MAPPED_LATER_BYTES_PER_CORE = 150_000_000
_MAPPED_LATER_FRACTION = (
    0.25  # of the limit at most, so that small runs start on machines with many cores
)

# cgroup v1 writes "no limit" as the largest page-aligned 64-bit number.
_UNLIMITED = 1 << 60


class Bound(NamedTuple):
    """A bound on new allocations: its name, and the bytes left below it."""

    bound: str
    free: int


# If no bound can be read, everything is allowed.
_UNKNOWN = Bound("unknown", 1 << 62)


def tightest_bound(device: torch.device | None = None) -> Bound:
    """Return the tightest bound on new allocations on a device (None: host)."""
    if device is not None and device.type == "cuda":
        return _cuda_bound(device)
    return min(_host_bounds(), key=lambda candidate: candidate.free, default=_UNKNOWN)


def available_bytes(device: torch.device | None = None) -> int:
    """Return the bytes that buffers may allocate: free memory minus a reserve for the program."""
    free = tightest_bound(device).free
    return max(0, free - max(_RESERVE_BYTES, int(free * _RESERVE_FRACTION)))


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
        f"({tightest_bound(device).bound}): {advice}"
    )


def memory_plan(parts: Mapping[str, int], device: torch.device | None = None) -> str:
    """Return one line for the log: bytes of the built parts, and what is still available."""
    listed = "".join(f"{name} {readable(nbytes)}, " for name, nbytes in parts.items())
    still = "still " if parts else ""
    free = f"{still}available {readable(available_bytes())}"
    if device is not None and device.type != "cpu":
        free += f" on the host, {readable(available_bytes(device))} on {device}"
    return f"memory plan: {listed}{free}"


def _cuda_bound(device: torch.device) -> Bound:
    free, total = torch.cuda.mem_get_info(device)
    # torch's unused cache counts as free.
    allocated = torch.cuda.memory_allocated(device)
    free += torch.cuda.memory_reserved(device) - allocated
    limit = limit_of_card(device, total)
    if limit - allocated < free:
        return Bound(f"memory.cuda_limit_mb, {readable(limit)} on {device}", limit - allocated)
    return Bound(f"{readable(total)} on {device}", free)


def _host_bounds() -> Iterator[Bound]:
    with suppress(*UNREADABLE):
        yield Bound("memory of this machine", psutil.virtual_memory().available)
    yield from cgroup_bounds()
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        to_come = _MAPPED_LATER_BYTES + _MAPPED_LATER_BYTES_PER_CORE * (psutil.cpu_count() or 1)
        with suppress(*UNREADABLE):
            mapped = int(psutil.Process().memory_info().vms)
            free = max(0, limit - mapped - min(to_come, int(_MAPPED_LATER_FRACTION * limit)))
            yield Bound(f"address space limit {readable(limit)}", free)


class _Files(NamedTuple):
    limit: str
    usage: str
    reclaimable: str  # page cache that the kernel reclaims before it kills a process


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")


def cgroup_bounds(proc: Path = Path("/proc/self")) -> Iterator[Bound]:
    """Yield the limits of this process's cgroup and of its ancestors."""
    for mount, group, files in _memory_groups(proc):
        for part in (group, *group.parents):
            yield from _group_bound(mount / part, files)


def _memory_groups(proc: Path) -> Iterator[tuple[Path, PurePosixPath, _Files]]:
    """Yield mount point, cgroup path and file names of each memory hierarchy."""
    paths = _group_paths(proc)
    for line in _lines(proc / "mountinfo"):
        # 36 35 98:0 /root /mount/point options … - fstype source superoptions
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or not kind:
            continue
        if kind[0] == "cgroup2":
            controller, files = "", _V2
        elif kind[0] == "cgroup" and "memory" in kind[-1].split(","):
            controller, files = "memory", _V1
        else:
            continue
        if controller in paths:
            yield Path(fields[4]), _below(paths[controller], fields[3]), files


def _group_paths(proc: Path) -> dict[str, str]:
    """Return controller name ("" for v2) → cgroup of this process."""
    paths = {}
    for line in _lines(proc / "cgroup"):
        parts = line.split(":", 2)  # 4:memory:/docker/abc or 0::/user.slice
        if len(parts) == 3:
            for controller in parts[1].split(","):
                paths[controller] = parts[2]
    return paths


def _below(group: str, mount_root: str) -> PurePosixPath:
    """Return the cgroup relative to the mount; outside of it, the mount itself."""
    path, root = PurePosixPath(group), PurePosixPath(mount_root)
    if ".." in path.parts or not path.is_relative_to(root):
        return PurePosixPath()
    return path.relative_to(root)


def _group_bound(directory: Path, files: _Files) -> Iterator[Bound]:
    limit = _read_int(directory / files.limit)
    usage = _read_int(directory / files.usage)
    if limit is None or usage is None or limit >= _UNLIMITED:
        return
    reclaimable = 0
    for line in _lines(directory / "memory.stat"):
        key, _, value = line.partition(" ")
        if key == files.reclaimable:
            reclaimable = int(value)
    free = max(0, limit - max(0, usage - reclaimable))
    yield Bound(f"cgroup limit {readable(limit)}", free)


def _read_int(path: Path) -> int | None:
    """Return a number; None for "max" and for missing files."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
