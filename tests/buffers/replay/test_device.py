"""The device replay, run on the CPU: no Python scalar becomes a tensor, nothing is read back.

On CUDA either would synchronise; `test_device_cuda.py` checks that on a GPU.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_factory import make_replay
from synthetic_envs import EnvConfig, SyntheticEnvs
from torch.utils._python_dispatch import TorchDispatchMode

from steadyrl.buffers.memory_layout import send

SCENE = EnvConfig(num_envs=3, frame_shape=(1, 6, 5), dtype="uint8", frame_stack=3, crash_rate=0.05)
# Operators that copy a Python scalar to the device or a tensor's value to the host.
SYNCHRONISING = {"scalar_tensor", "full", "nonzero", "_local_scalar_dense", "masked_select"}


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::").split(".")[0]
        if name == "lift_fresh" and args[0].dim() == 0:  # `tensor[index] = 0.0` makes one
            name = "scalar_tensor"
        self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("prioritized", [False, True])
def test_adding_and_sampling_never_synchronise(prioritized):
    replay, _ = make_replay("device", SCENE, 20, 3, 0.9, prioritized)
    envs = SyntheticEnvs(SCENE, 5)
    replay.start(envs.first())
    timesteps = list(envs.timesteps(60))
    evicted = False
    for timestep in timesteps:
        before = len(replay)
        with Operations() as seen:
            replay.add(*timestep)
        evicted |= len(replay) <= before
        assert not SYNCHRONISING & set(seen.names), timestep
    assert evicted  # so clearing leaves was covered
    with Operations() as seen:
        replay.sample(16)
    assert "index" in seen.names
    assert not SYNCHRONISING & set(seen.names)


def test_updating_priorities_synchronises_for_the_check_only():
    replay, _ = make_replay("device", SCENE, 20, 3, 0.9, True)
    envs = SyntheticEnvs(SCENE, 5)
    replay.start(envs.first())
    for timestep in envs.timesteps(30):
        replay.add(*timestep)
    batch = replay.sample(16)
    with Operations() as seen:
        replay.update_priorities(batch.index, batch.reward)
    # The single read is the CPU's check for non-finite TD errors.
    assert [name for name in seen.names if name in SYNCHRONISING] == ["_local_scalar_dense"]


@pytest.mark.parametrize("prioritized", [False, True])
def test_a_timestep_is_sent_in_one_copy(prioritized, monkeypatch):
    replay, _ = make_replay("device", SCENE, 20, 3, 0.9, prioritized)
    envs = SyntheticEnvs(SCENE, 5)
    replay.start(envs.first())
    copies = []
    monkeypatch.setattr(
        "steadyrl.buffers.replay.device.send",
        lambda *given: copies.append(len(given)) or send(*given),
    )
    for timestep in envs.timesteps(10):
        replay.add(*timestep)
    assert len(copies) == 10


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    """Arrays of all dtypes that are sent, also empty and non-contiguous ones."""
    kind = draw(st.sampled_from(["bool", "uint8", "int32", "int64", "float32", "float64"]))
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=3)))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    array = (random.random(shape) * 200).astype(kind)
    return array[:, ::2] if array.ndim > 1 and draw(st.booleans()) else array


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(arrays(), min_size=1, max_size=6))
def test_send_packs_arrays_unchanged_into_one_storage(given_arrays):
    sent = send(torch.device("cpu"), *given_arrays)
    for tensor, array in zip(sent, given_arrays, strict=True):
        assert tensor.numpy().dtype == array.dtype
        np.testing.assert_array_equal(tensor.numpy(), array)
    assert len({tensor.untyped_storage().data_ptr() for tensor in sent}) == 1
