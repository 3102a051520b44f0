"""Machine code made of a Python function, where buffers and environments need it.

Imported only there: the compiler takes half a second and 110 MB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` on its first call; keep the machine code for the next process.

    Installed read-only, without a cache directory that can be written, once per process.
    """
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        made: Callable[..., Any] = njit(cache=True, **options)(function)
    except RuntimeError:  # Numba found no place that it may write to
        made = njit(**options)(function)
    return made
