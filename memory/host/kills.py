"""How often the kernel has killed a process of this control group because memory ran out."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from steadyrl.memory.bounds import control_groups
from steadyrl.memory.process import PROC

_COUNTERS = ("memory.events", "memory.oom_control")  # control groups v2, v1


def kernel_kills(proc: Path = PROC) -> int:
    """Return the number of processes killed for memory; 0 if it cannot be read.

    The kernel counts a kill in the victim's own group, whichever limit was reached. Without a
    group that counts, those of the whole machine are returned.
    """
    for group in control_groups(proc):
        for name in _COUNTERS:
            counts = _read_counts(group.directory / name)
            if counts:
                # Linux before 4.13 tells only that a group of version 1 is out of memory now.
                return counts.get("oom_kill", counts.get("under_oom", 0))
    return _read_counts(proc / "vmstat").get("oom_kill", 0)


def _read_counts(path: Path) -> dict[str, int]:
    """Return the lines "name number" of a file; empty if it cannot be read."""
    counts = {}
    with suppress(OSError):
        for line in path.read_text().splitlines():
            name, _, number = line.partition(" ")
            with suppress(ValueError):
                counts[name] = int(number)
    return counts
