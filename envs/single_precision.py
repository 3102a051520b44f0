"""Sine and cosine of small angles in single precision with the bits that NumPy gives them.

Where a processor fuses products and sums, NumPy takes polynomials, whose coefficients are below.
They differ from what double precision rounds to in the last bit of a few in a hundred.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core import types
from numba.extending import intrinsic

from memory.compiled import compiled

F32 = np.float32
COS = tuple(map(F32, map(float.fromhex, ("0x1.98e616p-16", "-0x1.6c06dcp-10", "0x1.55553cp-5"))))
SIN = tuple(map(F32, map(float.fromhex, ("0x1.7d3bbcp-19", "-0x1.a06bbap-13", "0x1.11119ap-7"))))
COS_2, SIN_3 = F32(-0.5), F32(float.fromhex("-0x1.555556p-3"))
ONE = F32(1.0)


def _declare(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


# In kernels: a·b + c, rounded once.
fused: Any = intrinsic(_declare)


@compiled
def small_cos(angle: Any) -> Any:
    """Return the cosine of an angle between ±π/4 in float32."""
    square = angle * angle
    value = fused(fused(COS[0], square, COS[1]), square, COS[2])
    return fused(fused(value, square, COS_2), square, ONE)


@compiled
def small_sin(angle: Any) -> Any:
    """Return the sine of an angle between ±π/4 in float32."""
    square = angle * angle
    value = fused(fused(SIN[0], square, SIN[1]), square, SIN[2])
    return fused(F32(fused(value, square, SIN_3) * square), angle, angle)
