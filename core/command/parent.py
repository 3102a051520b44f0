"""End a process with the one that started it (Linux)."""

from __future__ import annotations

import ctypes
import os
import sys

# Loaded here, because a forked process had better not.
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
PR_SET_PDEATHSIG = 1


def end_with_parent(number: int, parent: int) -> bool:
    """Let the kernel send this process a signal when its parent dies; return whether it lives."""
    if LIBC is not None:
        LIBC.prctl(PR_SET_PDEATHSIG, number)
    return os.getppid() == parent
