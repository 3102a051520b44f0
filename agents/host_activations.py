"""The activations of networks as machine code, of a number or of many in place."""

from __future__ import annotations

from typing import Any

import numpy as np

from agents.network_settings import Activation
from agents.small_products import fused
from memory.compiled import compiled

RELU, TANH, ELU, SILU = range(4)
CODES: dict[Activation, int] = {"relu": RELU, "tanh": TANH, "elu": ELU, "silu": SILU}

F32 = np.float32
ZERO, HALF, ONE, TWO = F32(0), F32(0.5), F32(1), F32(2)
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
