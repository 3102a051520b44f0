"""The arrays of a step share one block of memory; checks for NaN and plain steps."""

from __future__ import annotations

import numpy as np
import pytest

from steadyrl.envs.encoding.step_buffer import StepBuffer, buffer_bytes
from steadyrl.envs.types import DiscreteActions, EnvSpec


def spec(dtype="float32", shape=(3,), n=2):
    return EnvSpec("Any-v0", n, shape, dtype, 1, DiscreteActions(2))


@pytest.mark.parametrize(("dtype", "shape"), [("float32", (3,)), ("uint8", (1, 5, 7))])
def test_arrays_do_not_overlap(dtype, shape):
    step = StepBuffer(spec(dtype, shape), 0)
    arrays = [step.obs, step.reward, step.terminated, step.truncated, step.valid]
    for i, array in enumerate(arrays):
        array[...] = i % 2
    for i, array in enumerate(arrays):
        assert (array == i % 2).all()
    assert step.obs.shape == (2, *shape)
    assert sum(array.nbytes for array in arrays) == buffer_bytes(spec(dtype, shape))
    assert np.shares_memory(step.frames[1], step.obs)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("name", "where"), [("reward", (1,)), ("obs", (1, 2))])
def test_non_finite_values_are_found_with_their_place(bad, name, where):
    step = StepBuffer(spec(), 0)
    assert step.is_finite()
    getattr(step, name)[where] = bad
    assert not step.is_finite()
    shown = f"{bad}, or beyond float32" if np.isinf(bad) else "nan"
    shown_name = "observation" if name == "obs" else name
    assert step.first_non_finite() == (shown_name, 1, where[1:], shown)


@pytest.mark.filterwarnings("ignore:overflow")
def test_large_numbers_are_finite():
    step = StepBuffer(spec(), 0)
    step.obs[:] = 3e38
    assert step.is_finite()


@pytest.mark.parametrize("value", [1e-25, 3e38])
def test_numbers_are_finite_where_numpy_raises(value):
    """As in an environment that calls np.seterr(all="raise")."""
    step = StepBuffer(spec(), 0)
    step.obs[:] = value
    with np.errstate(all="raise"):
        assert step.is_finite()
        step.obs[0] = np.nan
        assert not step.is_finite()


@pytest.mark.filterwarnings("error")
def test_numbers_are_finite_where_warnings_are_errors():
    step = StepBuffer(spec(), 0)
    step.obs[:] = 3e38
    assert step.is_finite()


def test_a_plain_step_is_valid_without_episode_ends():
    step = StepBuffer(spec(), 0)
    step.valid[:] = True
    assert step.is_plain_step()
    for name, value in (("valid", False), ("terminated", True), ("truncated", True)):
        array = getattr(step, name)
        array[1] = value
        assert not step.is_plain_step()
        array[1] = not value
        assert step.is_plain_step()
