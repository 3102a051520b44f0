"""NumPy's default generator (PCG64) in compiled code, bit for bit: seeding, floats and integers.

A generator is an array of six uint64: state and increment of PCG64 (high halves first), whether
half of a 64-bit draw is buffered, and that half. N generators are one array [N, 6], which compiled
code can reseed and checkpoints save as it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from steadyrl.core.jit import jit

WORDS = 6  # of one generator
HIGH, LOW, INC_HIGH, INC_LOW, KEPT, HALF = range(WORDS)

# All constants are uint64: Numba converts mixed uint64 and int64 operands to float64.
U64 = np.uint64
BITS_64 = 0xFFFFFFFFFFFFFFFF
BITS_32 = U64(0xFFFFFFFF)
ZERO, ONE, ELEVEN, SIXTEEN, HALF_WORD = U64(0), U64(1), U64(11), U64(16), U64(32)
INIT_A, TIMES_A = U64(0x43B0D7E5), U64(0x931E8875)
INIT_B, TIMES_B = U64(0x8B51F9DD), U64(0x58F38DED)
MIX_LEFT, MIX_RIGHT = U64(0xCA01F9DD), U64(0x4973F715)
STEP_HIGH, STEP_LOW = U64(0x2360ED051FC65DA4), U64(0x4385DF649FCCF645)


def words_of(generator: np.random.Generator) -> NDArray[np.uint64]:
    """Return the state of a NumPy generator as six words."""
    found: Any = generator.bit_generator.state
    state, step = found["state"]["state"], found["state"]["inc"]
    whole = (state >> 64, state & BITS_64, step >> 64, step & BITS_64)
    return np.array([*whole, found["has_uint32"], found["uinteger"]], np.uint64)


@jit
def _hashed(value: Any, constant: Any, times: Any) -> tuple[Any, Any]:
    """Return the hash of a seed word, and the hash constant for the next word."""
    value = (value ^ constant) & BITS_32
    constant = (constant * times) & BITS_32
    value = (value * constant) & BITS_32
    return value ^ (value >> SIXTEEN), constant


@jit
def _mixed(left: Any, right: Any) -> Any:
    value = (MIX_LEFT * left - MIX_RIGHT * right) & BITS_32
    return value ^ (value >> SIXTEEN)


@jit
def _pool(entropy: Any) -> Any:
    """Mix the words [W] of a seed into a pool of four, like `np.random.SeedSequence`."""
    pool, constant = np.zeros(4, np.uint64), INIT_A
    for i in range(4):
        pool[i], constant = _hashed(entropy[i] if i < len(entropy) else ZERO, constant, TIMES_A)
    for source in range(4):
        for target in range(4):
            if source != target:
                value, constant = _hashed(pool[source], constant, TIMES_A)
                pool[target] = _mixed(pool[target], value)
    for source in range(4, len(entropy)):
        for target in range(4):
            value, constant = _hashed(entropy[source], constant, TIMES_A)
            pool[target] = _mixed(pool[target], value)
    return pool


@jit
def episode_seed(seed: NDArray[Any], env: int, episode: int) -> Any:
    """Derive the seed of one episode of one environment from the words [W] of the run's seed."""
    entropy = np.empty(len(seed) + 2, np.uint64)
    for i in range(len(seed)):  # a slice assignment would take seconds to compile
        entropy[i] = seed[i]
    entropy[len(seed)] = env
    entropy[len(seed) + 1] = episode
    value, _ = _hashed(_pool(entropy)[0], INIT_B, TIMES_B)
    return value


@jit
def seed_generator(generator: NDArray[Any], seed: Any) -> None:
    """Seed a generator [6] like `np.random.default_rng(seed)`, for a seed of one 32-bit word."""
    entropy = np.empty(1, np.uint64)
    entropy[0] = seed
    pool, constant = _pool(entropy), INIT_B
    words = np.empty(4, np.uint64)
    for i in range(4):
        low, constant = _hashed(pool[(2 * i) % 4], constant, TIMES_B)
        high, constant = _hashed(pool[(2 * i + 1) % 4], constant, TIMES_B)
        words[i] = (high << HALF_WORD) | low
    generator[INC_HIGH] = (words[2] << ONE) | (words[3] >> U64(63))
    generator[INC_LOW] = (words[3] << ONE) | ONE
    generator[HIGH] = generator[LOW] = generator[KEPT] = generator[HALF] = ZERO
    _advance(generator)
    low = generator[LOW] + words[1]
    generator[HIGH] += words[0] + (ONE if low < words[1] else ZERO)
    generator[LOW] = low
    _advance(generator)


@jit
def _product_high(left: Any, right: Any) -> Any:
    """Return the upper 64 bits of a 128-bit product."""
    left_low, left_high = left & BITS_32, left >> HALF_WORD
    right_low, right_high = right & BITS_32, right >> HALF_WORD
    low = left_low * right_low
    middle = left_high * right_low + (low >> HALF_WORD)
    other = left_low * right_high + (middle & BITS_32)
    return left_high * right_high + (middle >> HALF_WORD) + (other >> HALF_WORD)


@jit
def _advance(generator: NDArray[Any]) -> None:
    high, low = generator[HIGH], generator[LOW]
    carried = _product_high(low, STEP_LOW) + high * STEP_LOW + low * STEP_HIGH
    low = low * STEP_LOW + generator[INC_LOW]
    generator[HIGH] = carried + generator[INC_HIGH] + (ONE if low < generator[INC_LOW] else ZERO)
    generator[LOW] = low


@jit
def _next_64(generator: NDArray[Any]) -> Any:
    _advance(generator)
    high, low = generator[HIGH], generator[LOW]
    value, turn = high ^ low, high >> U64(58)
    return (value >> turn) | (value << ((U64(64) - turn) & U64(63)))


@jit
def _next_32(generator: NDArray[Any]) -> Any:
    if generator[KEPT]:
        generator[KEPT] = ZERO
        return generator[HALF]
    value = _next_64(generator)
    generator[KEPT] = ONE
    generator[HALF] = value >> HALF_WORD
    return value & BITS_32


@jit
def random(generator: NDArray[Any]) -> float:
    """Draw from [0, 1) like `Generator.random()`."""
    drawn: float = np.float64(_next_64(generator) >> ELEVEN) * (1.0 / 9007199254740992.0)
    return drawn


@jit
def uniform(generator: NDArray[Any], low: float, high: float) -> float:
    """Draw from [low, high) like `Generator.uniform(low, high)`."""
    drawn: float = low + (high - low) * random(generator)
    return drawn


@jit
def integers(generator: NDArray[Any], low: int, high: int) -> int:
    """Draw from low…high-1 like `Generator.integers(low, high)`; at most 2^32 - 1 values."""
    count = U64(high - low)
    if count <= ONE:
        return low
    product = _next_32(generator) * count
    if (product & BITS_32) < count:
        least = (U64(0x100000000) - count) % count
        while (product & BITS_32) < least:
            product = _next_32(generator) * count
    return int(low + np.int64(product >> HALF_WORD))
