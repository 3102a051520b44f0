"""Replay buffers on host and device: state, sampling, settings, memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from replay_factory import REPLAY_KINDS, make_replay
from synthetic_envs import EnvConfig, SyntheticEnvs

from steadyrl.buffers.replay.build import build_replay
from steadyrl.buffers.replay.settings import ReplaySettings
from steadyrl.buffers.replay.timeline import ReplayLayout, Timeline
from steadyrl.core.errors import MemoryBudgetError, SettingError

SCENE = EnvConfig(num_envs=3, frame_shape=(1, 4, 3), dtype="uint8", frame_stack=3, mean_length=4.0)
CPU = torch.device("cpu")


def settings(**changes) -> ReplaySettings:
    plain = {
        "capacity": 100,
        "prioritized": True,
        "alpha": 0.6,
        "beta_start": 0.4,
        "beta_end": 1.0,
        "anneal_beta": "linear",
        "beta_warmup": 0.0,
        "normalize_weights": "replay",
        "device": "auto",
    }
    return ReplaySettings(**{**plain, **changes})


def build(
    chosen: ReplaySettings, scene: EnvConfig = SCENE, device: torch.device = CPU, n_step: int = 3
):
    return build_replay(
        chosen,
        frame_shape=scene.frame_shape,
        dtype=scene.dtype,
        frame_stack=scene.frame_stack,
        num_envs=scene.num_envs,
        n_step=n_step,
        gamma=0.99,
        device=device,
        seed=0,
    )


def filled(kind: str, *, prioritized: bool = True, timesteps: int = 60, seed: int = 0):
    replay, _ = make_replay(kind, SCENE, 50, 3, 0.9, prioritized, seed=seed)
    envs = SyntheticEnvs(SCENE, 5)
    replay.start(envs.first())
    for timestep in envs.timesteps(timesteps):
        replay.add(*timestep)
    return replay, envs


def copy_of(batch) -> list[np.ndarray]:
    return [part.numpy().copy() for part in batch]


@pytest.mark.parametrize("prioritized", [False, True])
def test_host_and_device_replay_sample_the_same_batches(prioritized):
    (host, envs), (device, _) = (filled(kind, prioritized=prioritized) for kind in REPLAY_KINDS)
    errors = np.random.default_rng(2)
    for timestep in envs.timesteps(80):
        batches = []
        td_error = torch.from_numpy(errors.normal(size=16).astype(np.float32))
        for replay in (host, device):
            replay.add(*timestep)
            batch = replay.sample(16, beta=0.7)
            batches.append(copy_of(batch))
            replay.update_priorities(batch.index, td_error)
        for ours, theirs in zip(*batches, strict=True):
            assert ours.dtype == theirs.dtype
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("timesteps", [1, 7, 60])
@pytest.mark.parametrize("target", REPLAY_KINDS)
@pytest.mark.parametrize("source", REPLAY_KINDS)
@pytest.mark.parametrize("prioritized", [False, True])
def test_a_saved_replay_continues_the_same_on_host_and_device(
    source, target, prioritized, timesteps
):
    replay, envs = filled(source, prioritized=prioritized, timesteps=timesteps)
    if prioritized and len(replay):
        replay.update_priorities(replay.sample(8).index, torch.linspace(-2, 2, 8))
    other, _ = filled(target, prioritized=prioritized, timesteps=23, seed=9)
    other.load_state_dict(replay.state_dict())
    for timestep in envs.timesteps(30):
        replay.add(*timestep)
        other.add(*timestep)
        assert len(replay) == len(other)
        if len(replay):
            ours, theirs = copy_of(replay.sample(8)), copy_of(other.sample(8))
            for one, two in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(one, two, rtol=1e-6)


def test_replay_states_of_other_settings_are_rejected_with_the_difference():
    replay, _ = filled("host")
    other, _ = make_replay("host", SCENE, 60, 3, 0.9, True)
    with pytest.raises(ValueError, match=r"capacity=50 \(here 60\)"):
        other.load_state_dict(replay.state_dict())
    plain, _ = make_replay("host", SCENE, 50, 3, 0.9, False)
    with pytest.raises(ValueError, match=r"prioritized=False \(here True\)"):
        replay.load_state_dict(plain.state_dict())


@pytest.mark.parametrize("kind", REPLAY_KINDS)
@pytest.mark.parametrize("prioritized", [False, True])
def test_sampling_changes_only_the_generator(kind, prioritized):
    replay, _ = filled(kind, prioritized=prioritized)

    def tensors(state) -> list[torch.Tensor]:
        if isinstance(state, dict):
            return [tensor for part in state.values() for tensor in tensors(part)]
        return [state.clone()] if isinstance(state, torch.Tensor) else []

    before, generator = tensors(replay.state_dict()), replay.state_dict()["random"]
    first = copy_of(replay.sample(16))
    after = tensors(replay.state_dict())
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
    assert replay.state_dict()["random"] != generator
    assert not np.array_equal(first[-1], replay.sample(16).index.numpy())


@pytest.mark.parametrize("kind", REPLAY_KINDS)
def test_a_cleared_replay_equals_a_new_one(kind):
    replay, envs = filled(kind)
    timestep = envs.step()
    replay.clear()
    assert len(replay) == 0
    with pytest.raises(RuntimeError, match="call start"):
        replay.add(*timestep)
    fresh, _ = make_replay(kind, SCENE, 50, 3, 0.9, True)
    fresh.load_state_dict({**fresh.state_dict(), "random": replay.state_dict()["random"]})
    for some in (replay, fresh):
        envs = SyntheticEnvs(SCENE, 8)
        some.start(envs.first())
        for timestep in envs.timesteps(10):
            some.add(*timestep)
    for ours, theirs in zip(replay.sample(8), fresh.sample(8), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", REPLAY_KINDS)
def test_uniform_sampling_is_uniform(kind):
    replay, _ = filled(kind, prioritized=False)
    count = len(replay)
    drawn = torch.cat([replay.sample(500).index.clone() for _ in range(40)])
    ids, times = drawn.unique(return_counts=True)
    assert len(ids) == count
    mean = len(drawn) / count
    assert ((times - mean).abs() < 6 * mean**0.5).all()


def test_priorities_of_evicted_transitions_are_not_updated():
    replay, envs = filled("host")
    index = replay.sample(16).index.clone()
    for timestep in envs.timesteps(8):
        replay.add(*timestep)
    replay.update_priorities(index, torch.full((16,), 50.0))
    leaves = replay.state_dict()["priorities"]["leaves"]
    assert torch.count_nonzero(leaves) == len(replay)


def test_a_valid_step_right_after_an_episode_end_is_rejected():
    scene = EnvConfig(num_envs=2)
    replay, _ = make_replay("host", scene, 10, 1, 0.9, False)
    obs = np.zeros((2, 2), np.float32)
    no, yes = np.zeros(2, np.bool_), np.ones(2, np.bool_)
    ended = np.array([False, True])
    replay.start(obs)
    action = np.zeros(2, np.int64)
    replay.add(action, np.zeros(2), ended, no, yes, obs)
    with pytest.raises(ValueError, match="environment 1 sent a valid timestep"):
        replay.add(action, np.zeros(2), no, no, yes, obs)
    replay.add(action, np.zeros(2), no, no, ~ended, obs)
    assert len(replay) == 3


def test_wrong_observation_shapes_and_early_sampling_are_rejected():
    replay, _ = make_replay("host", EnvConfig(num_envs=2), 10, 1, 0.9, False)
    with pytest.raises(ValueError, match=r"\(2, 3\) should be \(2, 2\)"):
        replay.start(np.zeros((2, 3), np.float32))
    with pytest.raises(RuntimeError, match="no complete transition"):
        replay.sample(4)


def test_updating_priorities_of_a_uniform_replay_does_nothing():
    replay, _ = filled("host", prioritized=False)
    batch = replay.sample(4)
    replay.update_priorities(batch.index, torch.full((4,), torch.nan))
    assert torch.equal(replay.sample(4).weight, torch.ones(4))


@pytest.mark.parametrize("prioritized", [False, True])
def test_atari_transitions_cost_one_frame_each(prioritized):
    scene = EnvConfig(num_envs=4, frame_shape=(1, 84, 84), dtype="uint8", frame_stack=4)
    replay = build(settings(capacity=2000, prioritized=prioritized), scene)
    assert replay.capacity == 2000
    assert replay.nbytes / replay.capacity < 7200


def test_a_replay_beyond_memory_is_rejected_with_a_fitting_capacity():
    for capacity in (10**13, 10**18, 10**60):
        with pytest.raises(MemoryBudgetError, match=r"replay needs .* largest capacity that fits"):
            build(settings(capacity=capacity))


def test_windows_beyond_memory_are_rejected_without_a_capacity():
    with pytest.raises(MemoryBudgetError, match=r"with n_step=10,000,000,000 and") as caught:
        build(settings(), n_step=10**10)
    assert "largest capacity" not in str(caught.value)
    with pytest.raises(MemoryBudgetError, match=r"and frame_stack=10,000,000,000 needs"):
        build(settings(), replace(SCENE, frame_stack=10**10))


def test_timestep_numbers_use_int32_unless_the_ring_needs_int64():
    layout = make_replay("host", SCENE, 50, 3, 0.9, True)[1]
    assert layout.timestep_dtype == np.int32
    longest = 2**31 - 3 - SCENE.frame_stack  # and the timesteps that its windows read
    for capacity, kind in ((3 * longest, np.int32), (3 * longest + 3, np.int64)):
        long = replace(layout, capacity=capacity)
        assert long.timestep_dtype == kind
        assert (long.ring_size <= 2**31 - 1) == (kind == np.int32)
        assert Timeline.bytes_needed(long) > long.slots + kind().itemsize * capacity


def test_auto_replay_follows_the_training_device():
    assert build(settings(device="auto")).state_dict()["frames"].device == CPU
    with pytest.raises(SettingError, match="the run trains on cpu"):
        build(settings(device="cuda"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("capacity", 0),
        ("alpha", -0.1),
        ("alpha", float("nan")),
        ("beta_start", 1.5),
        ("beta_end", -1.0),
        ("device", "tpu"),
    ],
)
def test_settings_out_of_range_are_rejected_by_name(field, value):
    with pytest.raises(SettingError, match=rf"^{field}={value}: "):
        settings(**{field: value})


@pytest.mark.parametrize("prioritized", [False, True])
def test_int64_timesteps_sample_the_same_as_int32(monkeypatch, prioritized):
    short, _ = filled("host", prioritized=prioritized)
    monkeypatch.setattr(ReplayLayout, "timestep_dtype", np.dtype(np.int64))
    long, _ = filled("host", prioritized=prioritized)
    assert long.state_dict()["timeline"]["sampleable"].dtype == torch.int64
    for ours, theirs in zip(short.sample(64), long.sample(64), strict=True):
        assert torch.equal(ours, theirs)


def test_capacity_is_rounded_up_to_whole_timesteps():
    replay, layout = make_replay("host", SCENE, 50, 10, 0.9, True)
    assert (replay.capacity, layout.span) == (51, 17)
    envs = SyntheticEnvs(SCENE, 0)
    replay.start(envs.first())
    for timestep in envs.timesteps(200):
        replay.add(*timestep)
        assert len(replay) <= replay.capacity


def test_release_frees_the_memory():
    replay, _ = filled("host")
    replay.release()
    assert not vars(replay)
