"""Memory limits of the control groups this process is in (v1 and v2, nested)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

# v1 writes "no limit" as the largest page-aligned 64-bit number.
_UNLIMITED = 1 << 60


class CgroupLimit(NamedTuple):
    """One group with a limit: how much, and how much of it is not in use."""

    limit: int
    free: int


class _Files(NamedTuple):
    limit: str
    usage: str
    reclaimable: str  # page cache that the kernel gives up before it kills anyone


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")


def cgroup_limits(proc: Path = Path("/proc/self")) -> list[CgroupLimit]:
    """Return every limit on the way from this process's group to the topmost visible one."""
    found = []
    for mount, group, files in _memory_groups(proc):
        directory = mount / group
        while True:
            limit = _read_limit(directory, files)
            if limit is not None:
                found.append(limit)
            if directory == mount:
                break
            directory = directory.parent
    return found


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


def _read_limit(directory: Path, files: _Files) -> CgroupLimit | None:
    limit = _read_int(directory / files.limit)
    usage = _read_int(directory / files.usage)
    if limit is None or usage is None or limit >= _UNLIMITED:
        return None
    reclaimable = 0
    for line in _lines(directory / "memory.stat"):
        key, _, value = line.partition(" ")
        if key == files.reclaimable:
            reclaimable = int(value)
    return CgroupLimit(limit, max(0, limit - max(0, usage - reclaimable)))


def _read_int(path: Path) -> int | None:
    """Return a number, or None for "max" and for files that are not there."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
