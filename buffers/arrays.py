"""Host arrays that are really there: on cache-line boundaries, with every page touched."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import DTypeLike, NDArray

CACHE_LINE = 64  # bytes


def touched_zeros(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray:
    """Return zeros that start on a cache line and whose pages exist, so that use adds none."""
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    raw = np.empty(size + CACHE_LINE, np.uint8)
    raw.fill(0)  # `np.zeros` would leave the pages to be mapped during training
    skip = -raw.ctypes.data % CACHE_LINE
    return raw[skip : skip + size].view(kind).reshape(shape)
