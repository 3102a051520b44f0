"""What memory there is, control groups counted in, and the refusal of what does not fit."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import psutil
import torch

from steadyrl.core.errors import MemoryBudgetError
from steadyrl.memory.process import UNREADABLE, readable

# Kept free of buffers for what else a run needs: stacks, libraries, compiled kernels.
_RESERVE_FRACTION = 0.05
_RESERVE_BYTES = 64_000_000
# An address space limit also counts what is only mapped: libraries loaded later (OpenBLAS spins
# for ever when it cannot map its buffers), and 72 MB for the stack and the heap of every thread,
# of which emulators that train and others that evaluate have one per core each.
_MAPPED_LATER_BYTES = 150_000_000
_MAPPED_LATER_BYTES_PER_CORE = 150_000_000
_MAPPED_LATER_FRACTION = 0.25  # of the limit at most: with many cores, small runs must still start

# v1 writes "no limit" as the largest page-aligned 64-bit number.
_UNLIMITED = 1 << 60


class Bound(NamedTuple):
    """The tightest bound on new memory: what sets it, and how many bytes are left below it."""

    bound: str
    free: int


# Where nothing can be read, nothing can be refused.
_UNKNOWN = Bound("unknown", 1 << 62)


def tightest_bound(device: torch.device | None = None) -> Bound:
    """Return the tightest of all bounds that apply to new memory on a device (None = host)."""
    if device is not None and device.type == "cuda":
        return _cuda_bound(device)
    return min(_host_bounds(), key=lambda candidate: candidate.free, default=_UNKNOWN)


def available_bytes(device: torch.device | None = None) -> int:
    """Return how much may be allocated, less a small reserve for the program itself."""
    free = tightest_bound(device).free
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
        capacity = int(available / unit_bytes)
        # Three digits: a number to type, and on the safe side.
        scale = int(10 ** max(0, len(str(capacity)) - 3))
        advice = f"the largest capacity that fits is {capacity // scale * scale:,}"
    else:
        advice = "make it smaller or give the run more memory"
    raise MemoryBudgetError(
        f"{name} needs {readable(nbytes)} but {readable(available)} are free "
        f"({tightest_bound(device).bound}): {advice}"
    )


def memory_plan(parts: Mapping[str, int], device: torch.device | None = None) -> str:
    """Say in one line what parts that are built take, and what else there is, on a device too."""
    listed = "".join(f"{name} {readable(nbytes)}, " for name, nbytes in parts.items())
    still = "still " if parts else ""
    free = f"{still}available {readable(available_bytes())}"
    if device is not None and device.type != "cpu":
        free += f" on the host, {readable(available_bytes(device))} on {device}"
    return f"memory plan: {listed}{free}"


def _cuda_bound(device: torch.device) -> Bound:
    free, total = torch.cuda.mem_get_info(device)
    # What torch holds in its cache without using it is as good as free to us.
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return Bound(f"{readable(total)} on {device}", free + cached)


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
    reclaimable: str  # page cache that the kernel gives up before it kills anyone


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")


def cgroup_bounds(proc: Path = Path("/proc/self")) -> Iterator[Bound]:
    """Yield every limit on the way from this process's group to the topmost visible one."""
    for mount, group, files in _memory_groups(proc):
        for part in (group, *group.parents):
            yield from _group_bound(mount / part, files)


def _memory_groups(proc: Path) -> Iterator[tuple[Path, PurePosixPath, _Files]]:
    """Yield mount point, group below it, and file names for each memory hierarchy."""
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
    """Map controller name ("" for v2) to the group of this process."""
    paths = {}
    for line in _lines(proc / "cgroup"):
        parts = line.split(":", 2)  # 4:memory:/docker/abc or 0::/user.slice
        if len(parts) == 3:
            for controller in parts[1].split(","):
                paths[controller] = parts[2]
    return paths


def _below(group: str, mount_root: str) -> PurePosixPath:
    """Return the group relative to what is mounted; outside of it means the mount itself."""
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
    """Return a number, or None for "max" and for files that are not there."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
