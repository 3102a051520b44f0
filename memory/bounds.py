"""The bounds on memory: machine, control groups, address space; what is used of each.

Used is what the system cannot take back by itself: file pages that it can drop (programs' too) are
free, pages in swap are not. A reading takes some 30 µs a bound.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import psutil

from steadyrl.memory.process import PROC, UNREADABLE, readable

# cgroup v1 writes "no limit" as the largest page-aligned 64-bit number.
_UNLIMITED = 1 << 60
_MOST = 16_384  # bytes read of a file: memory.stat has a few thousand
LOOK_SECONDS = 30.0  # between two looks for control groups that got a limit
_MEMINFO = 128  # its first three lines: MemTotal, MemFree, MemAvailable


class Bound(NamedTuple):
    """A bound: its name, the limit, and the bytes used of it."""

    name: str
    limit: int
    used: int
    shared: bool = True  # with other programs, which count too
    group: Path | None = None  # the control group's directory

    @property
    def free(self) -> int:
        """Return the bytes left below the limit."""
        return max(0, self.limit - self.used)


def margin_of(limit: int, saving: int = 0) -> int:
    """Return the bytes of a bound to leave free: saving the run takes them, and programs' pages.

    5 %, as Ray's and Dask's monitors leave. Less than 64 MB would make small groups read program
    code from the disk again and again; on large machines 512 MB are enough.
    """
    return min(max(limit // 20, 64_000_000), 512_000_000) + saving


class _Files(NamedTuple):
    """File names and keys of one version of control groups."""

    limits: tuple[str, ...]
    usage: str
    # Keys of memory.stat, of the whole subtree: file pages; those that must be written to the disk
    # first, which may take long; and swap.
    cache: tuple[bytes, ...]
    dirty: tuple[bytes, ...]
    swap: tuple[bytes, ...]
    swap_usage: str = ""


_V1 = _Files(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    (b"total_active_file", b"total_inactive_file"),
    (b"total_dirty", b"total_writeback"),
    (b"total_swap",),
)
_V2 = _Files(
    # Above memory.high nothing is killed: allocations wait, for seconds each.
    ("memory.max", "memory.high"),
    "memory.current",
    (b"active_file", b"inactive_file", b"slab_reclaimable"),
    (b"file_dirty", b"file_writeback"),
    (),
    "memory.swap.current",
)


class ControlGroup(NamedTuple):
    """A control group that this process is in."""

    directory: Path
    files: _Files

    def read(self) -> Bound | None:
        """Return limit and usage; None without a limit, or if they cannot be read."""
        found = (_read_int(self.directory / name) for name in self.files.limits)
        limit = min((each for each in found if each is not None), default=_UNLIMITED)
        usage = _read_int(self.directory / self.files.usage) if limit < _UNLIMITED else None
        if usage is None:
            return None
        stat, files = b"\n" + _read(self.directory / "memory.stat"), self.files
        reclaimable = max(0, _sum(stat, files.cache) - _sum(stat, files.dirty))
        swap = _sum(stat, files.swap)
        if files.swap_usage:
            swap += _read_int(self.directory / files.swap_usage) or 0
        used = max(0, usage - reclaimable) + swap
        return Bound(f"cgroup limit {readable(limit)}", limit, used, group=self.directory)


class Bounds:
    """The bounds above this process; a control group may get a limit while the run goes on."""

    def __init__(self, proc: Path = PROC, clock: Callable[[], float] = time.monotonic) -> None:
        """Find the control groups, and which of them have a limit now."""
        self._proc, self._clock = proc, clock
        self._all = [*control_groups(proc)]
        self._look_for_limits()

    def _look_for_limits(self) -> None:
        self._groups = [group for group in self._all if group.read() is not None]
        self._next_look = self._clock() + LOOK_SECONDS

    def read(self, swapped: int = 0) -> list[Bound]:
        """Return all bounds; `swapped`: bytes of this run in swap, which it will need again."""
        if self._clock() >= self._next_look:
            self._look_for_limits()
        found = [
            read_machine(self._proc, swapped),
            *(group.read() for group in self._groups),
            read_address_space(self._proc),
        ]
        return [bound for bound in found if bound is not None]


def read_machine(proc: Path = PROC, swapped: int = 0) -> Bound | None:
    """Return the machine's memory; None if it cannot be read."""
    name = "memory of this machine"
    text = b"\n" + _read(proc / "meminfo", _MEMINFO)
    total, available = 1024 * _sum(text, (b"MemTotal:",)), 1024 * _sum(text, (b"MemAvailable:",))
    if total and available:
        return Bound(name, total, total - available + swapped)
    try:
        memory = psutil.virtual_memory()
    except UNREADABLE:
        return None
    return Bound(name, memory.total, memory.total - memory.available + swapped)


def read_address_space(proc: Path = PROC) -> Bound | None:
    """Return the limit on what this process maps (ulimit -v); None without one."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    found = _read(proc / "self" / "statm").split()
    try:
        mapped = (
            int(found[0]) * resource.getpagesize() if found else psutil.Process().memory_info().vms
        )
    except UNREADABLE:
        return None
    return Bound(f"address space limit {readable(limit)}", limit, mapped, shared=False)


def control_groups(proc: Path = PROC) -> Iterator[ControlGroup]:
    """Yield this process's control group of each memory hierarchy, each with those above it."""
    paths = _group_paths(proc)
    for line in _lines(proc / "self" / "mountinfo"):
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
            group = _below(paths[controller], fields[3])
            for part in (group, *group.parents):
                yield ControlGroup(Path(fields[4]) / part, files)


def _group_paths(proc: Path) -> dict[str, str]:
    """Return controller name ("" for v2) → control group of this process."""
    paths = {}
    for line in _lines(proc / "self" / "cgroup"):
        parts = line.split(":", 2)  # 4:memory:/docker/abc or 0::/user.slice
        if len(parts) == 3:
            for controller in parts[1].split(","):
                paths[controller] = parts[2]
    return paths


def _below(group: str, mount_root: str) -> PurePosixPath:
    """Return the control group relative to the mount; outside of it, the mount itself."""
    path, root = PurePosixPath(group), PurePosixPath(mount_root)
    if ".." in path.parts or not path.is_relative_to(root):
        return PurePosixPath()
    return path.relative_to(root)


def _sum(text: bytes, keys: tuple[bytes, ...]) -> int:
    """Return the sum of the numbers in the lines "key number …"; missing keys count 0."""
    found = 0
    for key in keys:
        start = text.find(b"\n" + key) + 1 + len(key)
        if start > len(key):
            found += int(text[start:].split(None, 1)[0])
    return found


def _read_int(path: Path) -> int | None:
    """Return a number; None for "max" and for missing files."""
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return os.fsdecode(path.read_bytes()).splitlines()  # names of folders in any encoding
    except OSError:
        return []


def _read(path: Path, most: int = _MOST) -> bytes:
    """Return a small file's content; empty if it cannot be read."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(handle, most)
    except OSError:  # a control group that was removed
        return b""
    finally:
        os.close(handle)
