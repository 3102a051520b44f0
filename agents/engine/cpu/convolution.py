"""One convolution of small, mostly empty boards as compiled code: empty cells cost nothing.

Each nonzero cell adds its number times the filters to the sums of its neighbours, in a fixed
order: results are bitwise equal for one board and for many.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from steadyrl.agents.engine.cpu.products import add_multiple
from steadyrl.core.jit import floats_at, jit

ZERO = np.float32(0)


@jit
def transpose_filters(weight: int, filters: int, channels: int, tall: int, wide: int) -> Any:
    """Return filters [O, C, h, w] at an address as [C · h · w · O], mirrored along w.

    So the contributions of a cell to neighbouring sums are contiguous, as the sums are.
    """
    there = np.empty(channels * tall * wide * filters, np.float32)
    if filters:
        weights = floats_at(weight, len(there))
        for o in range(filters):
            for row in range(channels * tall):
                for i in range(wide):
                    to = (row * wide + wide - 1 - i) * filters + o
                    there[to] = weights[(o * channels * tall + row) * wide + i]
    return there


@jit
def convolve(weights: Any, tall: int, wide: int, bias: Any, board: Any, sums: Any, y: Any) -> None:
    """Write max(0, bias + filters * board) [O · h · w] for a board [C, H, W].

    `weights` are transposed filters, without padding. `sums` [h · w · O] is scratch memory.
    """
    channels, height, width = board.shape
    filters, rows, columns = len(bias), height - tall + 1, width - wide + 1
    places, size = rows * columns, 4
    for place in range(places):
        for o in range(filters):
            sums[place * filters + o] = bias[o]
    for channel in range(channels):
        for row in range(height):
            for column in range(width):
                number = board[channel, row, column]
                if number == ZERO:
                    continue
                first, last = max(0, column - wide + 1), min(column, columns - 1)
                many = (last + 1 - first) * filters
                for i in range(max(0, row - rows + 1), min(tall, row + 1)):
                    at = ((row - i) * columns + first) * filters
                    begin = (channel * tall + i) * wide + wide - 1 - column + first
                    given = weights.ctypes.data + begin * filters * size
                    add_multiple(number, given, many, sums.ctypes.data + at * size)
    for o in range(filters):
        for place in range(places):
            y[o * places + place] = max(sums[place * filters + o], ZERO)
