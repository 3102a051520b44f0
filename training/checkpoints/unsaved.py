"""Exit code 9: final files that could not be written, the disk that is full, and what to do."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Mapping
from pathlib import Path

from steadyrl.core.errors import ExpectedError
from steadyrl.memory.process import readable
from steadyrl.training.checkpoints.run_directory import resume_override

CHECKPOINT = "the last checkpoint"


class UnsavedError(ExpectedError):
    """The run ended, and its last checkpoint, policy or summary could not be written."""

    exit_code = 9
    together = True


def explain(run: Path, step: int, lost: Mapping[str, str], continues: bool) -> str:
    """Return one line: what is `lost` ({name: reason}), free disk space, and how to continue."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in lost.items():
        by_reason.setdefault(reason, []).append(name)
    what = "; ".join(f"{listed(names)}: {reason}" for reason, names in by_reason.items())
    again = (
        f"continue it with {resume_override(run)}"
        if continues
        else "start it again in another directory"
    )
    if os.strerror(errno.EFBIG) in what:
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        remedy = f"its files may have at most {readable(most)}: raise ulimit -f"
    elif os.strerror(errno.EMFILE) in what:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        remedy = f"at most {most:,} files may be open: raise ulimit -n"
    elif any(os.strerror(code) in what for code in (errno.ENOSPC, errno.EDQUOT)):
        remedy = f"{disk_space(run)}: free space"
    else:
        remedy = "mend this"
    return f"step {step:,} was reached, but not written: {what}; {remedy} and {again}"


def listed(names: list[str]) -> str:
    """Join names: "a, b and c"."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def disk_space(path: Path) -> str:
    """Describe the free space of the file system of `path`."""
    try:
        found = os.statvfs(path)
    except OSError as error:
        return f"{path} cannot be looked at ({error.strerror})"
    disk = path.resolve()
    while not os.path.ismount(disk):
        disk = disk.parent
    if found.f_files and not found.f_favail:
        return f"{disk} has no free inodes (all {found.f_files:,} are taken)"
    free, whole = (readable(n * found.f_frsize) for n in (found.f_bavail, found.f_blocks))
    return f"{free} of {whole} are free on {disk}"
