"""The device replay, run on the CPU: no Python scalar becomes a tensor, nothing is read back.

On CUDA either would synchronise; `test_device_cuda.py` checks that on a GPU.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tape
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_factory import make_replay
from synthetic_envs import EnvConfig, SyntheticEnvs
from torch.utils._python_dispatch import TorchDispatchMode

from steadyrl.buffers import memory_layout
from steadyrl.buffers.memory_layout import PackedInputs, send
from steadyrl.core import cuda_graph

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
    copies, pack = [], memory_layout._packed
    monkeypatch.setattr(
        memory_layout, "_packed", lambda *given: copies.append(len(given)) or pack(*given)
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
    inputs = PackedInputs([(t.dtype, tuple(t.shape)) for t in sent], torch.device("cpu"))
    before = [tensor.data_ptr() for tensor in inputs.tensors]
    inputs.send(*given_arrays)
    assert [tensor.data_ptr() for tensor in inputs.tensors] == before
    assert all(map(torch.equal, inputs.tensors, sent))


@pytest.mark.machinery
@pytest.mark.parametrize("crash_rate", [0.0, 0.2])
@pytest.mark.parametrize(("frame_stack", "n_step", "capacity"), [(1, 1, 4), (3, 3, 20), (1, 5, 7)])
@pytest.mark.parametrize("prioritized", [False, True])
def test_storing_by_a_cuda_graph_leaves_the_bits_of_the_host(
    prioritized, frame_stack, n_step, capacity, crash_rate, monkeypatch
):
    played = []

    def capture(function):
        play, outputs = tape.record(function)
        return lambda: (played.append(1), play()), outputs

    monkeypatch.setattr(cuda_graph, "capture", capture)
    monkeypatch.setattr(cuda_graph, "on_side_stream", lambda function: function())
    scene = replace(SCENE, frame_stack=frame_stack, crash_rate=crash_rate)
    host, device, graph = (
        make_replay(kind, scene, capacity, n_step, 0.9, prioritized, **more)[0]
        for kind, more in (("host", {}), ("device", {}), ("device", {"cuda_graph": True}))
    )
    envs = SyntheticEnvs(scene, 5)
    first = envs.first()
    for replay in (host, device, graph):
        replay.start(first)
    for timestep in envs.timesteps(80):
        for replay in (host, device, graph):
            replay.add(*timestep)
        saved, other, last = (replay.state_dict() for replay in (host, device, graph))
        for name in ("frames", "action", "reward"):
            assert torch.equal(saved[name], other[name]) and torch.equal(other[name], last[name])
        assert torch.equal(graph._flags, torch.from_numpy(host.timeline.flags))
        if prioritized:
            leaves = saved["priorities"]["leaves"]
            for found in (device, graph):
                assert torch.equal(found._priorities._flat[: len(leaves)], torch.as_tensor(leaves))
                assert not found._priorities._flat[len(leaves) :].any()
                sums = found._priorities._leaves.sum(1)
                assert torch.equal(found._priorities._sums, sums)
        if len(host) and prioritized:
            index, error = torch.from_numpy(host.timeline.sampleable_ids[:3]), timestep[1][0]
            for replay in (host, device, graph):
                replay.update_priorities(index, torch.full((len(index),), float(error)))
    assert len(played) >= 70


def test_the_host_holds_the_timeline_of_a_replay_on_a_device():
    replay, _ = make_replay("device", SCENE, 20, 3, 0.9, True, device=torch.device("meta"))
    assert replay.host_nbytes == replay.timeline.nbytes < replay.nbytes
    for place in ("device", "host"):
        replay, _ = make_replay(place, SCENE, 20, 3, 0.9, True)
        assert replay.host_nbytes == replay.nbytes
