"""NumPy's default generator in compiled code, to the last bit: seeding, floats and whole numbers.

A generator is a row of six uint64: the state and the increment of PCG64, high halves first, whether
half of a draw is kept, and that half. As plain numbers, N of them are one array that compiled code
may seed anew where an episode begins, and that is saved as it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from memory.compiled import compiled

WORDS = 6  # of one generator
HIGH, LOW, INC_HIGH, INC_LOW, KEPT, HALF = range(WORDS)

# Numba makes floats of uint64 and int64 together, so that every number here is a uint64.
U64 = np.uint64
BITS_64 = 0xFFFFFFFFFFFFFFFF
BITS_32 = U64(0xFFFFFFFF)
ZERO, ONE, ELEVEN, SIXTEEN, HALF_WORD = U64(0), U64(1), U64(11), U64(16), U64(32)
INIT_A, TIMES_A = U64(0x43B0D7E5), U64(0x931E8875)
INIT_B, TIMES_B = U64(0x8B51F9DD), U64(0x58F38DED)
MIX_LEFT, MIX_RIGHT = U64(0xCA01F9DD), U64(0x4973F715)
STEP_HIGH, STEP_LOW = U64(0x2360ED051FC65DA4), U64(0x4385DF649FCCF645)


def words_of(generator: np.random.Generator) -> NDArray[np.uint64]:
    """Return a generator of NumPy's in six words, from which compiled code goes on."""
    found: Any = generator.bit_generator.state
    state, step = found["state"]["state"], found["state"]["inc"]
    whole = (state >> 64, state & BITS_64, step >> 64, step & BITS_64)
    return np.array([*whole, found["has_uint32"], found["uinteger"]], np.uint64)


@compiled
def _hashed(value: Any, constant: Any, times: Any) -> tuple[Any, Any]:
    """Return the hash of a word of a seed, and the constant for the next word."""
    value = (value ^ constant) & BITS_32
    constant = (constant * times) & BITS_32
    value = (value * constant) & BITS_32
    return value ^ (value >> SIXTEEN), constant


@compiled
def _mixed(left: Any, right: Any) -> Any:
    value = (MIX_LEFT * left - MIX_RIGHT * right) & BITS_32
    return value ^ (value >> SIXTEEN)


@compiled
def _stirred(word: Any, into: Any, constant: Any) -> tuple[Any, Any]:
    """Mix a word into one of a pool; return that, and the constant for the next."""
    value, constant = _hashed(word, constant, TIMES_A)
    return _mixed(into, value), constant


# Words in variables: arrays of four would be made for every episode (and take 1 MB to load).
@compiled
def _pool(a: Any, b: Any, c: Any, d: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Mix the first four words of a seed as `np.random.SeedSequence` does; add the constant."""
    a, k = _hashed(a, INIT_A, TIMES_A)
    b, k = _hashed(b, k, TIMES_A)
    c, k = _hashed(c, k, TIMES_A)
    d, k = _hashed(d, k, TIMES_A)
    b, k = _stirred(a, b, k)
    c, k = _stirred(a, c, k)
    d, k = _stirred(a, d, k)
    a, k = _stirred(b, a, k)
    c, k = _stirred(b, c, k)
    d, k = _stirred(b, d, k)
    a, k = _stirred(c, a, k)
    b, k = _stirred(c, b, k)
    d, k = _stirred(c, d, k)
    a, k = _stirred(d, a, k)
    b, k = _stirred(d, b, k)
    c, k = _stirred(d, c, k)
    return a, b, c, d, k


@compiled
def _word(seed: NDArray[Any], env: int, episode: int, i: int) -> Any:
    """Return word `i` of a run's seed [W] with an environment and an episode after it."""
    if i < len(seed):
        return seed[i]
    if i == len(seed):
        return U64(env)
    return U64(episode) if i == len(seed) + 1 else ZERO


@compiled
def episode_seed(seed: NDArray[Any], env: int, episode: int) -> Any:
    """Derive the seed of one episode of one environment from the words [W] of the run's seed."""
    first = _word(seed, env, episode, 0), _word(seed, env, episode, 1)
    pool = _pool(*first, _word(seed, env, episode, 2), _word(seed, env, episode, 3))
    a, k = pool[0], pool[4]
    for i in range(4, len(seed) + 2):
        # Each of a long seed's words is hashed for every word of the pool; the first one is read.
        a, k = _stirred(_word(seed, env, episode, i), a, k)
        for _ in range(3):
            _, k = _hashed(ZERO, k, TIMES_A)
    value, _ = _hashed(a, INIT_B, TIMES_B)
    return value


@compiled
def _joined(low: Any, high: Any, constant: Any) -> tuple[Any, Any]:
    low, constant = _hashed(low, constant, TIMES_B)
    high, constant = _hashed(high, constant, TIMES_B)
    return (high << HALF_WORD) | low, constant


@compiled
def seed_generator(generator: NDArray[Any], seed: Any) -> None:
    """Make a generator [6] what `np.random.default_rng(seed)` is, for a seed of one word."""
    a, b, c, d, _ = _pool(seed, ZERO, ZERO, ZERO)
    state_high, k = _joined(a, b, INIT_B)
    state_low, k = _joined(c, d, k)
    step_high, k = _joined(a, b, k)
    step_low, _ = _joined(c, d, k)
    generator[INC_HIGH] = (step_high << ONE) | (step_low >> U64(63))
    generator[INC_LOW] = (step_low << ONE) | ONE
    generator[HIGH] = generator[LOW] = generator[KEPT] = generator[HALF] = ZERO
    _advance(generator)
    low = generator[LOW] + state_low
    generator[HIGH] += state_high + (ONE if low < state_low else ZERO)
    generator[LOW] = low
    _advance(generator)


@compiled
def _product_high(left: Any, right: Any) -> Any:
    """Return the upper 64 of a product's 128 bits."""
    left_low, left_high = left & BITS_32, left >> HALF_WORD
    right_low, right_high = right & BITS_32, right >> HALF_WORD
    low = left_low * right_low
    middle = left_high * right_low + (low >> HALF_WORD)
    other = left_low * right_high + (middle & BITS_32)
    return left_high * right_high + (middle >> HALF_WORD) + (other >> HALF_WORD)


@compiled
def _advance(generator: NDArray[Any]) -> None:
    high, low = generator[HIGH], generator[LOW]
    carried = _product_high(low, STEP_LOW) + high * STEP_LOW + low * STEP_HIGH
    low = low * STEP_LOW + generator[INC_LOW]
    generator[HIGH] = carried + generator[INC_HIGH] + (ONE if low < generator[INC_LOW] else ZERO)
    generator[LOW] = low


@compiled
def _next_64(generator: NDArray[Any]) -> Any:
    _advance(generator)
    high, low = generator[HIGH], generator[LOW]
    value, turn = high ^ low, high >> U64(58)
    return (value >> turn) | (value << ((U64(64) - turn) & U64(63)))


@compiled
def _next_32(generator: NDArray[Any]) -> Any:
    if generator[KEPT]:
        generator[KEPT] = ZERO
        return generator[HALF]
    value = _next_64(generator)
    generator[KEPT] = ONE
    generator[HALF] = value >> HALF_WORD
    return value & BITS_32


@compiled
def random(generator: NDArray[Any]) -> float:
    """Draw from [0, 1) as `Generator.random()` does."""
    drawn: float = np.float64(_next_64(generator) >> ELEVEN) * (1.0 / 9007199254740992.0)
    return drawn


@compiled
def uniform(generator: NDArray[Any], low: float, high: float) -> float:
    """Draw from [low, high) as `Generator.uniform(low, high)` does."""
    drawn: float = low + (high - low) * random(generator)
    return drawn


@compiled
def integers(generator: NDArray[Any], low: int, high: int) -> int:
    """Draw from low…high-1 as `Generator.integers(low, high)` does; at most 2^32 - 1 of them."""
    count = U64(high - low)
    if count <= ONE:
        return low
    product = _next_32(generator) * count
    if (product & BITS_32) < count:
        least = (U64(0x100000000) - count) % count
        while (product & BITS_32) < least:
            product = _next_32(generator) * count
    drawn: int = low + np.int64(product >> HALF_WORD)
    return drawn
