"""Small dense networks as machine code, for those who act on the host.

For the few observations of one step, starting torch's kernels takes several times as long as the
arithmetic. Weights are read where they lie, so there is nothing to keep in step. Every sum has an
order of its own: the numbers are the same to the last bit for one row and for many, and in whatever
function this is compiled into.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agents.network_settings import Activation
from agents.small_products import (
    LANES,
    MANY,
    add_four_products,
    add_inputs_to_eight,
    add_inputs_to_many,
    add_inputs_to_one,
    add_one_product,
    fused,
)
from memory.compiled import compiled, floats_at

Floats = NDArray[np.float32]

# Columns of a plan, a row for each layer: where its arrays are, and their sizes. Weights are
# [in, out], or [out, in] where it is transposed; without a norm its address is 0.
WEIGHT, BIAS, NORM_WEIGHT, NORM_BIAS, INPUTS, OUTPUTS, TRANSPOSED, COLUMNS = range(8)
RELU, TANH, ELU, SILU = range(4)
CODES: dict[Activation, int] = {"relu": RELU, "tanh": TANH, "elu": ELU, "silu": SILU}

F32 = np.float32
ZERO, HALF, ONE, TWO = F32(0), F32(0.5), F32(1), F32(2)
NORM_EPSILON = F32(1e-5)  # torch's own
# Rational approximation of tanh (Eigen's), to a few units in the last place; ±1 from there on.
FLAT = F32(7.9)
ODD = tuple(
    map(
        F32,
        (
            -2.76076847742355e-16,
            2.00018790482477e-13,
            -8.60467152213735e-11,
            5.12229709037114e-08,
            1.48572235717979e-05,
            6.37261928875436e-04,
            4.89352455891786e-03,
        ),
    )
)
EVEN = tuple(
    map(
        F32,
        (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03),
    )
)


class Layer(NamedTuple):
    """A linear layer, and the norm after it if there is one."""

    weight: Floats  # [in, out], or [out, in] if transposed
    bias: Floats  # [out]
    transposed: bool = False
    norm: tuple[Floats, Floats] | None = None  # its weight and bias [out]


class HostNetwork:
    """Linear layers with norms and an activation between them."""

    def __init__(self, layers: Sequence[Layer], activation: Activation) -> None:
        self._layers = layers  # which keeps the memory that the plan points to
        self.plan: NDArray[np.int64] = np.array([_row(layer) for layer in layers], np.int64)
        self.activation = CODES[activation]
        self.outputs = int(self.plan[-1, OUTPUTS])

    def __call__(self, x: NDArray[Any]) -> Floats:
        """Return the last layer's output [N, K] for inputs [N, …]."""
        y = np.empty((len(x), self.outputs), np.float32)
        flat = np.ascontiguousarray(x, np.float32).reshape(len(x), -1)
        forward(self.plan, self.activation, flat, y)
        return y


def _row(layer: Layer) -> list[int]:
    outputs, inputs = layer.weight.shape if layer.transposed else layer.weight.shape[::-1]
    arrays = (layer.weight, layer.bias, *(layer.norm or ()))
    if not all(array.flags.c_contiguous and array.dtype == np.float32 for array in arrays):
        raise ValueError("weights must be contiguous float32")
    places = [array.ctypes.data for array in arrays]
    return [*places, *[0] * (4 - len(places)), inputs, outputs, layer.transposed]


@compiled
def tanh(x: Any) -> Any:
    """Return tanh(x) of a float32."""
    inner = min(max(x, -FLAT), FLAT)
    square = inner * inner
    odd = ODD[0]
    odd = fused(odd, square, ODD[1])
    odd = fused(odd, square, ODD[2])
    odd = fused(odd, square, ODD[3])
    odd = fused(odd, square, ODD[4])
    odd = fused(odd, square, ODD[5])
    odd = fused(odd, square, ODD[6])
    even = EVEN[0]
    even = fused(even, square, EVEN[1])
    even = fused(even, square, EVEN[2])
    even = fused(even, square, EVEN[3])
    y = inner * odd / even
    y = ONE if x >= FLAT else y
    return -ONE if x <= -FLAT else y


@compiled
def activate(x: Any, activation: int) -> None:
    """Apply an activation to numbers [F] in place; elu and silu by way of tanh, which is quick."""
    if activation == RELU:
        for i in range(len(x)):
            x[i] = max(x[i], ZERO)
    elif activation == TANH:
        for i in range(len(x)):
            x[i] = tanh(x[i])
    elif activation == ELU:
        for i in range(len(x)):
            t = tanh(HALF * min(x[i], ZERO))
            x[i] = max(x[i], ZERO) + TWO * t / (ONE - t)
    else:
        for i in range(len(x)):
            x[i] = x[i] * (HALF + HALF * tanh(HALF * x[i]))


@compiled
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


@compiled
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


@compiled
def _times_transposed(x: Any, weight: int, y: Any) -> None:
    """Add x [in] times a weight [out, in] at an address to y [out]."""
    inputs, outputs = len(x), len(y)
    whole, size = outputs - outputs % 4, x.itemsize
    given, made = x.ctypes.data, y.ctypes.data
    for o in range(0, whole, 4):
        add_four_products(given, weight + o * inputs * size, inputs, made + o * size)
    for o in range(whole, outputs):
        add_one_product(given, weight + o * inputs * size, inputs, made + o * size)


@compiled
def forward(plan: Any, activation: int, x: Any, y: Any) -> None:
    """Write the last layer's output [N, K] for inputs [N, D]."""
    layers, widest = len(plan), 0
    for layer in range(layers):
        widest = max(widest, plan[layer, OUTPUTS])
    room = np.empty((2, widest), np.float32)
    for n in range(len(x)):
        here = x[n]
        for layer in range(layers):
            outputs = plan[layer, OUTPUTS]
            there = y[n] if layer == layers - 1 else room[layer % 2, :outputs]
            bias = floats_at(plan[layer, BIAS], outputs)
            for o in range(outputs):
                there[o] = bias[o]
            if plan[layer, TRANSPOSED]:
                _times_transposed(here, plan[layer, WEIGHT], there)
            else:
                _times(here, plan[layer, WEIGHT], there)
            if layer < layers - 1:
                if plan[layer, NORM_WEIGHT]:
                    _normalise(
                        there,
                        floats_at(plan[layer, NORM_WEIGHT], outputs),
                        floats_at(plan[layer, NORM_BIAS], outputs),
                    )
                activate(there, activation)
            here = there
