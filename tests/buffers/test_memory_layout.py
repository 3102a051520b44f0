"""Memory layout of the arrays of buffers."""

import numpy as np

from steadyrl.buffers.memory_layout import CACHE_LINE, prefaulted_zeros


def test_arrays_start_on_a_cache_line():
    for size in (1, 7, 100):
        array = prefaulted_zeros((size, 3), np.float64)
        assert array.ctypes.data % CACHE_LINE == 0
        assert array.shape == (size, 3)
        assert not array.any()
