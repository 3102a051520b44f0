"""`np.random.RandomState` (Mersenne Twister) in compiled code, bit for bit, for MinAtar.

A generator is an array of 625 uint64: the 624 words, and the position of the next one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from steadyrl.core.jit import jit
from steadyrl.envs.kernels.pcg64 import BITS_32, ONE, U64, ZERO

LENGTH, SHIFT = 624, 397
WORDS = LENGTH + 1
PLACE = LENGTH
UPPER, LOWER = U64(0x80000000), U64(0x7FFFFFFF)
TWIST, GROWTH = U64(0x9908B0DF), U64(1812433253)
MASK_B, MASK_C = U64(0x9D2C5680), U64(0xEFC60000)
S5, S6, S7, S11, S15, S18, S30 = map(U64, (5, 6, 7, 11, 15, 18, 30))


@jit
def seed_twister(twister: NDArray[Any], seed: Any) -> None:
    """Seed a generator [625] like `np.random.RandomState(seed)`."""
    word = U64(seed) & BITS_32
    for place in range(LENGTH):
        twister[place] = word
        word = (GROWTH * (word ^ (word >> S30)) + U64(place + 1)) & BITS_32
    twister[PLACE] = U64(LENGTH)


@jit
def _twist(twister: NDArray[Any]) -> None:
    for place in range(LENGTH):
        word = (twister[place] & UPPER) | (twister[(place + 1) % LENGTH] & LOWER)
        twisted = twister[(place + SHIFT) % LENGTH] ^ (word >> ONE)
        twister[place] = twisted ^ (TWIST if word & ONE else ZERO)
    twister[PLACE] = ZERO


@jit
def _next_32(twister: NDArray[Any]) -> Any:
    if twister[PLACE] >= U64(LENGTH):
        _twist(twister)
    word = twister[np.int64(twister[PLACE])]
    twister[PLACE] += ONE
    word ^= word >> S11
    word ^= (word << S7) & MASK_B
    word ^= (word << S15) & MASK_C
    return word ^ (word >> S18)


@jit
def rand(twister: NDArray[Any]) -> float:
    """Draw from [0, 1) like `RandomState.rand()`."""
    high, low = _next_32(twister) >> S5, _next_32(twister) >> S6
    drawn: float = (np.float64(high) * 67108864.0 + np.float64(low)) / 9007199254740992.0
    return drawn


@jit
def randint(twister: NDArray[Any], low: int, high: int) -> int:
    """Draw from low…high-1 like `RandomState.randint(low, high)`; at most 2^32 - 1 values."""
    most = U64(high - low - 1)
    if most == ZERO:
        return low
    mask = most
    for shift in (1, 2, 4, 8, 16):
        mask |= mask >> U64(shift)
    drawn = _next_32(twister) & mask
    while drawn > most:
        drawn = _next_32(twister) & mask
    return int(low + np.int64(drawn))
