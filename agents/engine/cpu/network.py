"""Small networks as compiled code on the host, for acting.

For the few observations of one step, launching torch's kernels takes several times as long as the
arithmetic. Weights are read in place, so they are never stale. Sums have a fixed order: results are
bitwise equal for one row and for many, whatever function this is inlined into.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from steadyrl.agents.engine.cpu.activations import CODES, F32, ONE, ZERO, activate
from steadyrl.agents.engine.cpu.convolution import convolve, transpose_filters
from steadyrl.agents.engine.cpu.products import (
    LANES,
    MANY,
    ROWS_AT_ONCE,
    add_four_products,
    add_inputs_to_eight,
    add_inputs_to_many,
    add_inputs_to_one,
    add_one_product,
    add_two_products_of_each,
)
from steadyrl.agents.networks.settings import Activation
from steadyrl.core.jit import floats_at, jit

Floats = NDArray[np.float32]

# Columns of a layer table, which has a row per layer: addresses of its arrays, and their sizes.
# Weights are [in, out], or [out, in] if TRANSPOSED; addresses of absent norms are 0. SCALED: the
# first layer's inputs are bytes, divided by 255. The other columns are for convolutions.
WEIGHT, BIAS, NORM_WEIGHT, NORM_BIAS, INPUTS, OUTPUTS, TRANSPOSED, SCALED = range(8)
FILTERS, CHANNELS, HEIGHT, WIDTH, TALL, WIDE, COLUMNS = range(8, 15)

INV_255 = F32(1.0 / 255.0)
NORM_EPSILON = F32(1e-5)  # torch's default


class Layer(NamedTuple):
    """A linear layer, and the layer norm after it, if any."""

    weight: Floats  # [in, out], or [out, in] if transposed
    bias: Floats  # [out]
    transposed: bool = False
    norm: tuple[Floats, Floats] | None = None  # weight and bias [out]


class Convolution(NamedTuple):
    """A convolution without padding, followed by ReLU."""

    weight: Floats  # [O, C, h, w]
    bias: Floats  # [O]
    board: tuple[int, int]  # H, W


class HostNetwork:
    """An optional convolution, then linear layers with layer norms and activations between them.

    `scaled`: inputs are bytes, divided by 255.
    """

    def __init__(
        self,
        layers: Sequence[Layer | Convolution],
        activation: Activation,
        *,
        scaled: bool = False,
    ) -> None:
        _check_shapes(layers)
        self._layers = layers  # keeps the arrays alive that the layer table points to
        self.layer_table: NDArray[np.int64] = np.array(
            [_layer_row(layer) for layer in layers], np.int64
        )
        self.layer_table[0, SCALED] = scaled
        self.activation = CODES[activation]
        self.inputs, self.outputs = (
            int(self.layer_table[0, INPUTS]),
            int(self.layer_table[-1, OUTPUTS]),
        )

    def __call__(self, x: NDArray[Any]) -> Floats:
        """Return the outputs [N, K] for inputs [N, …]."""
        y, rows = np.empty((len(x), self.outputs), np.float32), np.ascontiguousarray(x)
        rows = rows.reshape(len(x), -1)
        if rows.shape[1] != self.inputs:
            raise ValueError(
                f"the network has {self.inputs} inputs, but {rows.shape[1]} were given"
            )
        forward(self.layer_table, self.activation, rows, y)
        return y


def _check_shapes(layers: Sequence[Layer | Convolution]) -> None:
    """Raise ValueError unless the arrays have the sizes that compiled code assumes."""
    before: int | None = None
    for number, layer in enumerate(layers):
        inputs, outputs = _layer_row(layer)[INPUTS], _layer_row(layer)[OUTPUTS]
        norms: tuple[Floats, ...] = ()
        biases = outputs
        if isinstance(layer, Convolution):
            biases = len(layer.weight)
            height, width = layer.board
            fits = layer.weight.shape[2] <= height and layer.weight.shape[3] <= width
        else:
            norms, fits = layer.norm or (), layer.weight.ndim == 2
        fits = fits and layer.bias.shape == (biases,)
        fits = fits and all(norm.shape == (outputs,) for norm in norms)
        if not fits or min(inputs, outputs) < 1 or before not in (None, inputs):
            given = "" if before is None else f" after {before} outputs"
            raise ValueError(f"layer {number} of {inputs} inputs and {outputs} outputs{given}")
        before = outputs


def _layer_row(layer: Layer | Convolution) -> list[int]:
    row = [0] * COLUMNS
    arrays = [layer.weight, layer.bias]
    if isinstance(layer, Convolution):
        filters, channels, tall, wide = layer.weight.shape
        height, width = layer.board
        row[FILTERS:] = filters, channels, height, width, tall, wide
        row[INPUTS] = channels * height * width
        row[OUTPUTS] = filters * (height - tall + 1) * (width - wide + 1)
    else:
        arrays += layer.norm or ()
        sizes = layer.weight.shape[::-1] if layer.transposed else layer.weight.shape
        row[INPUTS], row[OUTPUTS] = sizes
        row[TRANSPOSED] = layer.transposed
    if not all(array.flags.c_contiguous and array.dtype == np.float32 for array in arrays):
        raise ValueError("weights must be contiguous float32")
    row[: len(arrays)] = [array.ctypes.data for array in arrays]
    return row


@jit
def _normalise(x: Any, weight: Any, bias: Any) -> None:
    mean = square = ZERO
    count = F32(len(x))
    for i in range(len(x)):
        mean += x[i]
    mean /= count
    for i in range(len(x)):
        x[i] -= mean
    for i in range(len(x)):
        square += x[i] * x[i]
    scale = np.sqrt(square / count + NORM_EPSILON)
    for i in range(len(x)):
        x[i] = x[i] / scale * weight[i] + bias[i]


@jit
def _times(x: Any, weight: int, y: Any) -> None:
    """Add x [in] times a weight [in, out] at an address to y [out]."""
    inputs, outputs, size = len(x), len(y), x.itemsize
    given, made, o = x.ctypes.data, y.ctypes.data, 0
    while o + MANY <= outputs:
        add_inputs_to_many(given, inputs, weight + o * size, outputs, made + o * size)
        o += MANY
    while o + LANES <= outputs:
        add_inputs_to_eight(given, inputs, weight + o * size, outputs, made + o * size)
        o += LANES
    for at in range(o, outputs):
        add_inputs_to_one(given, inputs, weight + at * size, outputs, made + at * size)


@jit
def _times_transposed(x: Any, weight: int, y: Any) -> None:
    """Add x [in] times a weight [out, in] at an address to y [out]."""
    inputs, outputs = len(x), len(y)
    whole, size = outputs - outputs % 4, x.itemsize
    given, made = x.ctypes.data, y.ctypes.data
    for o in range(0, whole, 4):
        add_four_products(given, weight + o * inputs * size, inputs, made + o * size)
    for o in range(whole, outputs):
        add_one_product(given, weight + o * inputs * size, inputs, made + o * size)


@jit
def _rows_times_transposed(
    x: int, inputs: int, weight: int, y: int, outputs: int, row_stride: int
) -> None:
    """Add x [ROWS_AT_ONCE, in] times a weight [out, in] to y [ROWS_AT_ONCE, out], all at addresses.

    Row strides are in bytes. Weights are read once for all rows.
    """
    size, whole = 4, outputs - outputs % 2
    for o in range(0, whole, 2):
        at, to = weight + o * inputs * size, y + o * size
        add_two_products_of_each(x, at, inputs, to, row_stride)
    for row in range(ROWS_AT_ONCE):
        for o in range(whole, outputs):
            to = y + row * row_stride + o * size
            add_one_product(x + row * row_stride, weight + o * inputs * size, inputs, to)


@jit
def _linear(layer_row: Any, scratch: Any, side: int, rows: int) -> None:
    """Write one linear layer's output to the other side of the scratch memory [N, out]."""
    inputs, outputs, weight = layer_row[INPUTS], layer_row[OUTPUTS], layer_row[WEIGHT]
    bias = floats_at(layer_row[BIAS], outputs)
    all_at_once = layer_row[TRANSPOSED] and rows == ROWS_AT_ONCE
    for n in range(rows):
        here, there = scratch[side, n, :inputs], scratch[1 - side, n, :outputs]
        for o in range(outputs):
            there[o] = bias[o]
        if not layer_row[TRANSPOSED]:
            _times(here, weight, there)
        elif not all_at_once:
            _times_transposed(here, weight, there)
    if all_at_once:
        begin, across, row_stride = scratch.ctypes.data, scratch.strides[0], scratch.strides[1]
        x, y = begin + side * across, begin + (1 - side) * across
        _rows_times_transposed(x, inputs, weight, y, outputs, row_stride)


@jit
def _convolve_boards(
    layer_row: Any, filters: Any, sums: Any, scratch: Any, side: int, rows: int
) -> None:
    """Write the convolution of boards [N, C · H · W] to the other side [N, O · h · w]."""
    bias = floats_at(layer_row[BIAS], layer_row[FILTERS])
    for n in range(rows):
        board = scratch[side, n, : layer_row[INPUTS]].reshape(
            layer_row[CHANNELS], layer_row[HEIGHT], layer_row[WIDTH]
        )
        convolve(filters, layer_row[TALL], layer_row[WIDE], bias, board, sums, scratch[1 - side, n])


@jit
def _norm_and_activate(layer_row: Any, activation: int, scratch: Any, side: int, rows: int) -> None:
    """Apply norm and activation after a layer to one side of the scratch memory [N, out]."""
    outputs = layer_row[OUTPUTS]
    for n in range(rows):
        there = scratch[side, n, :outputs]
        if layer_row[NORM_WEIGHT]:
            weight = floats_at(layer_row[NORM_WEIGHT], outputs)
            _normalise(there, weight, floats_at(layer_row[NORM_BIAS], outputs))
        activate(there, activation)


@jit
def _widest(layer_table: Any) -> int:
    widest: int = layer_table[0, OUTPUTS]
    for layer in range(1, len(layer_table)):
        widest = max(widest, layer_table[layer, OUTPUTS])
    return widest


@jit
def _forward_rows(layer_table: Any, activation: int, x: Any, y: Any) -> None:
    """Compute `forward` row by row, without convolutions or scaling."""
    layers = len(layer_table)
    scratch = np.empty((2, _widest(layer_table)), np.float32)
    for n in range(len(x)):
        here = x[n]
        for layer in range(layers):
            outputs = layer_table[layer, OUTPUTS]
            there = y[n] if layer == layers - 1 else scratch[layer % 2, :outputs]
            bias = floats_at(layer_table[layer, BIAS], outputs)
            for o in range(outputs):
                there[o] = bias[o]
            if layer_table[layer, TRANSPOSED]:
                _times_transposed(here, layer_table[layer, WEIGHT], there)
            else:
                _times(here, layer_table[layer, WEIGHT], there)
            if layer < layers - 1:
                if layer_table[layer, NORM_WEIGHT]:
                    _normalise(
                        there,
                        floats_at(layer_table[layer, NORM_WEIGHT], outputs),
                        floats_at(layer_table[layer, NORM_BIAS], outputs),
                    )
                activate(there, activation)
            here = there


@jit
def _forward_batched(layer_table: Any, activation: int, x: Any, y: Any) -> None:
    """Compute `forward` for ROWS_AT_ONCE rows at a time."""
    first, layers = layer_table[0], len(layer_table)
    scratch = np.empty((2, ROWS_AT_ONCE, max(first[INPUTS], _widest(layer_table))), np.float32)
    filters = sums = scratch[0, 0]  # unused without a convolution
    if first[FILTERS]:
        filters = transpose_filters(
            first[WEIGHT], first[FILTERS], first[CHANNELS], first[TALL], first[WIDE]
        )
        sums = np.empty(first[OUTPUTS], np.float32)
    part = INV_255 if first[SCALED] else ONE
    for begin in range(0, len(x), ROWS_AT_ONCE):
        rows = min(ROWS_AT_ONCE, len(x) - begin)
        for n in range(rows):
            for i in range(x.shape[1]):
                scratch[0, n, i] = F32(x[begin + n, i]) * part
        for layer in range(layers):
            layer_row, side = layer_table[layer], layer % 2
            if layer_row[FILTERS]:
                _convolve_boards(layer_row, filters, sums, scratch, side, rows)
                continue
            _linear(layer_row, scratch, side, rows)
            if layer < layers - 1:
                _norm_and_activate(layer_row, activation, scratch, 1 - side, rows)
        for n in range(rows):
            for o in range(y.shape[1]):
                y[begin + n, o] = scratch[layers % 2, n, o]


@jit
def forward(layer_table: Any, activation: int, x: Any, y: Any) -> None:
    """Write the outputs [N, K] for inputs [N, D]; both implementations give the same bits."""
    if layer_table[0, FILTERS] or layer_table[0, SCALED]:
        _forward_batched(layer_table, activation, x, y)
    else:
        _forward_rows(layer_table, activation, x.astype(np.float32), y)
