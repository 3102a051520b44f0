"""malloc of the C library: its functions, and the setting that must precede any thread."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

M_ARENA_MAX = -8  # glibc's malloc.h


def libc(name: str) -> Any:
    """Return a function of the C library; None if it does not exist or on other systems."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


def trim() -> None:
    """Return freed memory of glibc's malloc to the system (malloc_trim); takes milliseconds.

    By itself glibc keeps free memory below a used block. Other C libraries have no such call.
    """
    hand_back = libc("malloc_trim")
    if hand_back is not None:
        hand_back(0)


def use_one_arena() -> None:
    """Make all threads use one malloc arena: glibc keeps freed memory per arena, for good."""
    choose = libc("mallopt")
    if choose is not None:
        choose(M_ARENA_MAX, 1)
