"""Activations as compiled code, of one number or of an array in place."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from steadyrl.agents.engine.cpu.products import fma
from steadyrl.agents.networks.settings import Activation
from steadyrl.core.jit import jit

RELU, TANH, ELU, SILU = range(4)
CODES: dict[Activation, int] = {"relu": RELU, "tanh": TANH, "elu": ELU, "silu": SILU}

F32 = np.float32
ZERO, HALF, ONE, TWO = F32(0), F32(0.5), F32(1), F32(2)
# Rational approximation of tanh (Eigen's), accurate to a few ulp; ±1 beyond FLAT.
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

# e^x after Cephes: a series of x − n·ln 2, with ln 2 subtracted in two parts.
LOG2_E, LN2_HIGH, LN2_LOW = F32(1.4426950408889634), F32(-0.693359375), F32(2.12194440e-4)
LEAST = F32(-87.0)  # e^LEAST is close to the smallest normal float32
EXPONENT_BIAS, MANTISSA_BITS = 127, 23
SERIES = tuple(
    map(
        F32,
        (
            1.9875691500e-4,
            1.3981999507e-3,
            8.3334519073e-3,
            4.1665795894e-2,
            1.6666665459e-1,
            5.0000001201e-1,
        ),
    )
)


def _declare_power_of_two(typing_context: Any, exponent: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        (exponent,) = values
        biased = builder.add(exponent, ir.Constant(exponent.type, EXPONENT_BIAS))
        bits = builder.shl(biased, ir.Constant(exponent.type, MANTISSA_BITS))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(types.int32), generate


# In compiled code: power_of_two(n) returns 2^n as float32, for an int32 n in −126 to 127.
power_of_two: Any = intrinsic(_declare_power_of_two)


@jit
def exp_of_negative(x: Any) -> Any:
    """Return e^x of a float32 x ≤ 0, accurate to a few ulp; 0 below e^−87."""
    inner = max(x, LEAST)
    n = np.int32(fma(inner, LOG2_E, -HALF))  # truncation towards 0 rounds to nearest
    whole = F32(n)
    rest = fma(whole, LN2_HIGH, inner)
    rest = fma(whole, LN2_LOW, rest)
    series = SERIES[0]
    series = fma(series, rest, SERIES[1])
    series = fma(series, rest, SERIES[2])
    series = fma(series, rest, SERIES[3])
    series = fma(series, rest, SERIES[4])
    series = fma(series, rest, SERIES[5])
    y = (fma(series, rest * rest, rest) + ONE) * power_of_two(n)
    return y if x >= LEAST else ZERO


@jit
def silu(x: Any) -> Any:
    """Return x·σ(x) of a float32, by e^−|x|, which stays accurate where σ is nearly 0."""
    small = exp_of_negative(-abs(x))
    return x * (ONE if x >= ZERO else small) / (ONE + small)


@jit
def tanh(x: Any) -> Any:
    """Return tanh(x) of a float32."""
    inner = min(max(x, -FLAT), FLAT)
    square = inner * inner
    odd = ODD[0]
    odd = fma(odd, square, ODD[1])
    odd = fma(odd, square, ODD[2])
    odd = fma(odd, square, ODD[3])
    odd = fma(odd, square, ODD[4])
    odd = fma(odd, square, ODD[5])
    odd = fma(odd, square, ODD[6])
    even = EVEN[0]
    even = fma(even, square, EVEN[1])
    even = fma(even, square, EVEN[2])
    even = fma(even, square, EVEN[3])
    y = inner * odd / even
    y = ONE if x >= FLAT else y
    return -ONE if x <= -FLAT else y


@jit
def activate(x: Any, activation: int) -> None:
    """Apply an activation to numbers [F] in place; ELU by tanh, which is fast."""
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
            x[i] = silu(x[i])
