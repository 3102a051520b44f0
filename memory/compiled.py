"""Machine code made of a Python function, where buffers and environments need it.

Imported only there: the compiler takes half a second and 110 MB.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import numpy as np
from numba import njit

CONSTANTS = (bool, int, float, str, tuple, np.generic)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` on its first call; keep the machine code for the next process.

    Installed read-only, without a cache directory that can be written, once per process.
    """
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        made: Any = njit(cache=True, **options)(function)
    except RuntimeError:  # Numba found no place that it may write to
        made = njit(**options)(function)
    made.made_of = _made_of(function)
    # Numba itself looks at the function's own file only, but what it calls is in there too.
    with contextlib.suppress(AttributeError):
        kept = made._cache._cache_file
        kept._source_stamp = (kept._source_stamp, made.made_of)
    found: Callable[..., Any] = made
    return found


def _made_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Name what else the machine code consists of: constants, functions, and what those are of."""
    whole = function.__code__
    within = [code for code in whole.co_consts if isinstance(code, CodeType)]  # comprehensions
    found = set()
    for name in {name for code in (whole, *within) for name in code.co_names}:
        value = function.__globals__.get(name)
        file = getattr(sys.modules.get(getattr(value, "__module__", "")), "__file__", None)
        if isinstance(value, CONSTANTS):
            found.add(f"{name} = {value!r}")
        elif file is not None and os.path.exists(file):  # not within an archive
            status = os.stat(file)
            found |= {
                f"{file} {status.st_mtime_ns} {status.st_size}",
                *getattr(value, "made_of", ()),
            }
    return tuple(sorted(found))
