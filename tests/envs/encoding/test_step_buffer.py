"""The arrays of a row share one block, and the cheap checks on it are right."""

from __future__ import annotations

import numpy as np
import pytest

from steadyrl.envs.encoding.step_buffer import StepBuffer, buffer_bytes
from steadyrl.envs.types import DiscreteActions, EnvSpec


def spec(dtype="float32", shape=(3,), n=2):
    return EnvSpec("Any-v0", n, shape, dtype, 1, DiscreteActions(2))


@pytest.mark.parametrize(("dtype", "shape"), [("float32", (3,)), ("uint8", (1, 5, 7))])
def test_arrays_do_not_overlap(dtype, shape):
    row = StepBuffer(spec(dtype, shape), 0)
    arrays = [row.obs, row.reward, row.terminated, row.truncated, row.valid]
    for i, array in enumerate(arrays):
        array[...] = i % 2
    for i, array in enumerate(arrays):
        assert (array == i % 2).all()
    assert row.obs.shape == (2, *shape)
    assert sum(array.nbytes for array in arrays) == buffer_bytes(spec(dtype, shape))
    assert np.shares_memory(row.frames[1], row.obs)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("name", "where"), [("reward", (1,)), ("obs", (1, 2))])
def test_what_is_not_finite_is_found(bad, name, where):
    row = StepBuffer(spec(), 0)
    assert row.is_finite()
    getattr(row, name)[where] = bad
    assert not row.is_finite()
    said = ("observation", f"element [2] is {bad}") if name == "obs" else (name, f"it is {bad}")
    assert row.first_non_finite() == (said[0], 1, said[1])


@pytest.mark.filterwarnings("ignore:overflow")
def test_large_numbers_are_finite():
    row = StepBuffer(spec(), 0)
    row.obs[:] = 3e38
    assert row.is_finite()


def test_only_a_step_of_all_without_an_end_is_ordinary():
    row = StepBuffer(spec(), 0)
    row.valid[:] = True
    assert row.is_plain_step()
    for name, value in (("valid", False), ("terminated", True), ("truncated", True)):
        array = getattr(row, name)
        array[1] = value
        assert not row.is_plain_step()
        array[1] = not value
        assert row.is_plain_step()
