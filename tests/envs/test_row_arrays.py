"""The arrays of a row share one block, and the cheap checks on it are right."""

from __future__ import annotations

import numpy as np
import pytest

from envs.rows import Rows, row_bytes
from envs.types import DiscreteActions, EnvSpec


def spec(dtype="float32", shape=(3,), n=2):
    return EnvSpec("Any-v0", n, shape, dtype, 1, DiscreteActions(2))


@pytest.mark.parametrize(("dtype", "shape"), [("float32", (3,)), ("uint8", (1, 5, 7))])
def test_arrays_do_not_overlap(dtype, shape):
    rows = Rows(spec(dtype, shape))
    arrays = [rows.obs, rows.reward, rows.terminated, rows.truncated, rows.valid]
    for i, array in enumerate(arrays):
        array[...] = i % 2
    for i, array in enumerate(arrays):
        assert (array == i % 2).all()
    assert rows.obs.shape == (2, *shape)
    assert sum(array.nbytes for array in arrays) == row_bytes(spec(dtype, shape))
    assert np.shares_memory(rows.frames[1], rows.obs)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("name", "where"), [("reward", (1,)), ("obs", (1, 2))])
def test_what_is_not_finite_is_found(bad, name, where):
    rows = Rows(spec())
    assert rows.is_finite()
    getattr(rows, name)[where] = bad
    assert not rows.is_finite()
    assert rows.not_finite() == ({"obs": "observation"}.get(name, name), 1)


@pytest.mark.filterwarnings("ignore:overflow")
def test_large_numbers_are_finite():
    rows = Rows(spec())
    rows.obs[:] = 3e38
    assert rows.is_finite()


def test_only_a_step_of_all_without_an_end_is_ordinary():
    rows = Rows(spec())
    rows.valid[:] = True
    assert rows.is_ordinary()
    for name, value in (("valid", False), ("terminated", True), ("truncated", True)):
        array = getattr(rows, name)
        array[1] = value
        assert not rows.is_ordinary()
        array[1] = not value
        assert rows.is_ordinary()
