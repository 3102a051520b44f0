"""The accelerator's replay, watched on the CPU: no host scalar becomes a tensor, nothing is read.

On CUDA either would wait for the device. `test_replay_cuda.py` says the same where there is one.
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
# What a Python number turns into as an operand, and what brings a tensor's value to the host.
WAITS = {"scalar_tensor", "full", "nonzero", "_local_scalar_dense", "masked_select"}


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
def test_adding_and_drawing_wait_for_nothing(prioritized):
    replay, _ = make_replay("device", SCENE, 20, 3, 0.9, prioritized)
    traffic = SyntheticEnvs(SCENE, 5)
    replay.start(traffic.first())
    rows = list(traffic.timesteps(60))
    died = False
    for row in rows:
        before = len(replay)
        with Operations() as seen:
            replay.add(*row)
        died |= len(replay) <= before
        assert not WAITS & set(seen.names), row
    assert died  # leaves were emptied too
    with Operations() as seen:
        replay.sample(16)
    assert "index" in seen.names
    assert not WAITS & set(seen.names)


def test_updating_waits_for_nothing_but_the_check():
    replay, _ = make_replay("device", SCENE, 20, 3, 0.9, True)
    traffic = SyntheticEnvs(SCENE, 5)
    replay.start(traffic.first())
    for row in traffic.timesteps(30):
        replay.add(*row)
    batch = replay.sample(16)
    with Operations() as seen:
        replay.update_priorities(batch.index, batch.reward)
    # The one look is the CPU's own: a wrong error is refused at once there.
    assert [name for name in seen.names if name in WAITS] == ["_local_scalar_dense"]


@pytest.mark.parametrize("prioritized", [False, True])
def test_a_row_travels_in_one_copy(prioritized, monkeypatch):
    replay, _ = make_replay("device", SCENE, 20, 3, 0.9, prioritized)
    traffic = SyntheticEnvs(SCENE, 5)
    replay.start(traffic.first())
    copies = []
    monkeypatch.setattr(
        "steadyrl.buffers.replay.device.send",
        lambda *given: copies.append(len(given)) or send(*given),
    )
    for row in traffic.timesteps(10):
        replay.add(*row)
    assert len(copies) == 10


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    """Arrays of all the types that travel, empty ones and ones with gaps between their rows."""
    kind = draw(st.sampled_from(["bool", "uint8", "int32", "int64", "float32", "float64"]))
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=3)))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    whole = (random.random(shape) * 200).astype(kind)
    return whole[:, ::2] if whole.ndim > 1 and draw(st.booleans()) else whole


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(arrays(), min_size=1, max_size=6))
def test_what_is_sent_together_arrives_as_it_was(given_arrays):
    sent = send(torch.device("cpu"), *given_arrays)
    for tensor, array in zip(sent, given_arrays, strict=True):
        assert tensor.numpy().dtype == array.dtype
        np.testing.assert_array_equal(tensor.numpy(), array)
    assert len({tensor.untyped_storage().data_ptr() for tensor in sent}) == 1
