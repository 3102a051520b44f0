"""The compiled random generators draw the same numbers as NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from steadyrl.envs.backends.single_env import episode_seed as plain_episode_seed
from steadyrl.envs.kernels import mt19937 as kernel_mersenne
from steadyrl.envs.kernels.acrobot import small_cos, small_sin
from steadyrl.envs.kernels.mt19937 import rand, randint, seed_twister
from steadyrl.envs.kernels.pcg64 import (
    WORDS,
    episode_seed,
    integers,
    random,
    seed_generator,
    uniform,
    words_of,
)
from steadyrl.envs.kernels.state import seed_words


@pytest.mark.parametrize("seed", [0, 1, 123456, 2**32 - 1])
def test_draws_equal_numpys_generator(seed):
    ours, theirs = np.zeros(WORDS, np.uint64), np.random.default_rng(seed)
    seed_generator(ours, np.uint64(seed))
    for count in [1, 2, 7, 10, 1000, 3 * 2**30, 2**32 - 1] * 60:
        assert random(ours) == theirs.random()
        assert integers(ours, -3, count - 3) == theirs.integers(-3, count - 3)
        assert uniform(ours, -0.05, 0.07) == theirs.uniform(-0.05, 0.07)
    np.testing.assert_array_equal(ours, words_of(theirs))


@pytest.mark.parametrize("seed", [0, 1, 777, 2**32 - 1])
def test_draws_equal_numpys_random_state(seed):
    ours, theirs = np.zeros(kernel_mersenne.WORDS, np.uint64), np.random.RandomState(seed)
    seed_twister(ours, np.uint64(seed))
    for count in [1, 2, 3, 8, 100, 2**32 - 1] * 60:
        assert rand(ours) == theirs.rand()
        assert randint(ours, 1, count + 1) == theirs.randint(1, count + 1)


@pytest.mark.parametrize("seed", [0, 7, 2**32, 2**64 + 3, 2**160 - 1])
def test_compiled_episode_seeds_equal_those_of_other_backends(seed):
    words = seed_words(seed)
    for env in (0, 1, 5):
        for episode in (0, 1, 1_000_000):
            assert episode_seed(words, env, episode) == plain_episode_seed(seed, env, episode)


def test_sine_and_cosine_of_small_angles_equal_numpy():
    angles = np.random.default_rng(0).uniform(-0.78, 0.78, 5_000).astype(np.float32)
    assert [small_sin(angle) for angle in angles] == list(np.sin(angles))
    assert [small_cos(angle) for angle in angles] == list(np.cos(angles))


def test_negative_seeds_are_rejected():
    with pytest.raises(ValueError, match="not -1"):
        seed_words(-1)
