"""What of a run could not be written, where the room ran out, and what to do about it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from steadyrl.core.errors import ExpectedError
from steadyrl.memory.process import readable

CHECKPOINT = "the last checkpoint"


class UnsavedError(ExpectedError):
    """A run came to its end, and not all that it came to is on the disk."""

    exit_code = 9
    together = True


def explain(run: Path, step: int, lost: Mapping[str, str], continues: bool) -> str:
    """Return in a line what is `lost` (name → reason), where, and how to go on."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in lost.items():
        by_reason.setdefault(reason, []).append(name)
    what = "; ".join(f"{listed(names)}: {reason}" for reason, names in by_reason.items())
    again = f"continue it with resume={run}" if continues else "start it again in another directory"
    return f"step {step:,} was reached, but not written: {what}; {room(run)}: make room and {again}"


def listed(names: list[str]) -> str:
    """Return names as a sentence has them."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def room(path: Path) -> str:
    """Return how much room there is on the file system of `path`."""
    try:
        found = os.statvfs(path)
    except OSError as error:
        return f"{path} cannot be looked at ({error.strerror})"
    disk = path.resolve()
    while not os.path.ismount(disk):
        disk = disk.parent
    if found.f_files and not found.f_favail:
        return f"{disk} has room for no more files (all {found.f_files:,} are taken)"
    free, whole = (readable(n * found.f_frsize) for n in (found.f_bavail, found.f_blocks))
    return f"{free} of {whole} are free on {disk}"
