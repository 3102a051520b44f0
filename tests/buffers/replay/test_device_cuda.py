"""Replay and rollout on CUDA: the same batches as on the host, without synchronisation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from replay_factory import make_replay
from synthetic_envs import EnvConfig, SyntheticEnvs

from steadyrl.buffers.replay.build import build_replay
from steadyrl.buffers.replay.delayed_priorities import DelayedPriorities
from steadyrl.buffers.replay.settings import ReplaySettings
from steadyrl.buffers.rollout.buffer import RolloutBuffer
from steadyrl.core.errors import NonFiniteError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SCENE = EnvConfig(num_envs=3, frame_shape=(1, 6, 5), dtype="uint8", frame_stack=3, crash_rate=0.05)
CUDA = torch.device("cuda")


@pytest.mark.parametrize("prioritized", [False, True])
def test_host_and_device_replay_sample_the_same_batches(prioritized):
    replays = [
        make_replay(kind, SCENE, 60, 3, 0.9, prioritized, device=device)[0]
        for kind, device in (("host", torch.device("cpu")), ("host", CUDA), ("device", CUDA))
    ]
    if prioritized:  # the host's priorities are one update late, compared in the next test
        del replays[1]
    envs_ = SyntheticEnvs(SCENE, 5)
    first = envs_.first()
    for replay in replays:
        replay.start(first)
    for timestep in envs_.timesteps(200):
        for replay in replays:
            replay.add(*timestep)
        if not len(replays[0]):
            continue
        batches = [replay.sample(16, beta=0.6) for replay in replays]
        assert {part.device.type for part in batches[-1]} == {"cuda"}
        assert {part.device.type for part in batches[1][:-1]} == {"cuda"}
        for parts in zip(*batches, strict=True):
            for part in parts[1:]:
                torch.testing.assert_close(part.cpu(), parts[0])
        error = batches[0].reward - 0.3
        for replay, batch in zip(replays, batches, strict=True):
            replay.update_priorities(batch.index, error.to(batch.obs.device))


def test_delayed_priorities_equal_those_emulated_on_the_cpu():
    ours, _ = make_replay("host", SCENE, 60, 3, 0.9, True, device=CUDA)
    naive, _ = make_replay("host", SCENE, 60, 3, 0.9, True)
    naive._delayed = DelayedPriorities(torch.device("cpu"))
    envs_ = SyntheticEnvs(SCENE, 5)
    first = envs_.first()
    for replay in (ours, naive):
        replay.start(first)
    for timestep in envs_.timesteps(150):
        for replay in (ours, naive):
            replay.add(*timestep)
        if len(ours):
            error = torch.rand(16)
            there, here = ours.sample(16), naive.sample(16)
            assert torch.equal(there.index, here.index)
            ours.update_priorities(there.index, error.to(CUDA))
            naive.update_priorities(here.index, error)


def test_adding_sampling_and_updating_never_synchronise():
    replay, _ = make_replay("device", SCENE, 60, 3, 0.9, True, device=CUDA)
    envs_ = SyntheticEnvs(SCENE, 5)
    replay.start(envs_.first())
    timesteps = list(envs_.timesteps(40))
    for timestep in timesteps:  # first calls load kernels, which synchronises
        replay.add(*timestep)
    batch = replay.sample(16)
    replay.update_priorities(batch.index, batch.reward)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        replay.add(*envs_.step())
        batch = replay.sample(16)
        replay.update_priorities(batch.index, batch.reward)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_non_finite_td_errors_are_rejected_at_the_next_update():
    replay, _ = make_replay("device", SCENE, 60, 1, 0.9, True, device=CUDA)
    envs_ = SyntheticEnvs(SCENE, 5)
    replay.start(envs_.first())
    for timestep in envs_.timesteps(20):
        replay.add(*timestep)
    index = replay.sample(4).index
    wrong = torch.tensor([1.0, math.nan, 2.0, 3.0], device=CUDA)
    replay.update_priorities(index, wrong)
    torch.cuda.synchronize()
    with pytest.raises(NonFiniteError, match=r"td_error\[1\]=nan"):
        replay.update_priorities(index, torch.ones(4, device=CUDA))


def test_auto_replay_is_on_the_gpu_when_it_fits():
    plain = {
        "alpha": 0.6,
        "beta_start": 0.4,
        "beta_end": 1.0,
        "anneal_beta": "linear",
        "beta_warmup": 0.0,
        "normalize_weights": "replay",
        "prioritized": True,
    }
    shape = {"frame_shape": (8,), "dtype": "float32", "frame_stack": 1, "num_envs": 1}
    settings = ReplaySettings(capacity=1000, device="auto", **plain)
    replay = build_replay(settings, **shape, n_step=3, gamma=0.9, device=CUDA, seed=0)
    assert replay.state_dict()["frames"].device.type == "cuda"


def test_advantages_on_the_gpu_equal_those_on_the_host():
    random = np.random.default_rng(0)
    steps, envs = 12, 3
    rollouts = [
        RolloutBuffer(
            steps=steps,
            num_envs=envs,
            observation_shape=(2,),
            observation_dtype=torch.float32,
            action_shape=(),
            action_dtype=torch.int64,
            device=device,
        )
        for device in (torch.device("cpu"), CUDA)
    ]
    for _ in range(2):
        reward, value = random.normal(size=(2, steps + 1, envs)).astype(np.float32)
        ended = random.random((steps, envs)) < 0.2
        valid = np.ones((steps, envs), np.bool_)
        valid[1:] = ~ended[:-1]
        ended &= valid
        for rollout in rollouts:
            device = rollout.obs.device
            rollout.clear()
            for t in range(steps):
                values = torch.from_numpy(value[t]).to(device)
                obs = torch.full((envs, 2), float(t), device=device)
                action = torch.arange(envs, device=device)
                no = np.zeros(envs, np.bool_)
                rollout.add(obs, action, values, values, reward[t], ended[t], no, valid[t])
            last = torch.from_numpy(value[-1]).to(device)
            rollout.compute_advantages(last, gamma=0.9, gae_lambda=0.8)
        torch.testing.assert_close(rollouts[1].advantage.cpu(), rollouts[0].advantage)


@pytest.mark.parametrize("kind", ["host", "device"])
def test_pending_priorities_of_a_host_replay_are_loaded(kind):
    straight, _ = make_replay("host", SCENE, 60, 3, 0.9, True, device=CUDA)
    resumed, _ = make_replay(kind, SCENE, 60, 3, 0.9, True, device=CUDA)
    envs_ = SyntheticEnvs(SCENE, 5)
    straight.start(envs_.first())
    for timestep in envs_.timesteps(40):
        straight.add(*timestep)
    batch = straight.sample(16)
    straight.update_priorities(batch.index, batch.reward - 0.3)
    resumed.load_state_dict(straight.state_dict())
    for replay in (straight, resumed):
        replay.update_priorities(batch.index, torch.zeros(16, device=CUDA))
    expected = straight.metadata()["priorities"]["leaves"]
    if kind == "device":  # not one update late: the zeros count already
        expected = expected.clone()
        expected[batch.index] = resumed.metadata()["priorities"]["leaves"].cpu()[batch.index]
    torch.testing.assert_close(resumed.metadata()["priorities"]["leaves"].cpu(), expected)
