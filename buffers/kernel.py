"""Compile a function with Numba, cached on disk where the disk allows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` on its first call; keep the machine code for the next process.

    Installed read-only, without a writable cache directory, it compiles once per process.
    """
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        compiled: Callable[..., Any] = njit(cache=True, **options)(function)
    except RuntimeError:  # Numba found no place that it may write to
        compiled = njit(**options)(function)
    return compiled
