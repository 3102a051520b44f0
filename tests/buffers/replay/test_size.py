"""Resident memory of a million Atari transitions: allocated at once, constant while filling."""

from __future__ import annotations

import gc

import numpy as np
import psutil
import pytest
import torch

from steadyrl.buffers.replay.build import build_replay
from steadyrl.buffers.replay.settings import ReplaySettings
from steadyrl.memory.budget import available_bytes

GB = 1e9


def resident() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


@pytest.mark.slow
def test_a_million_atari_transitions_have_constant_memory():
    if available_bytes() < 8 * GB:
        pytest.skip("less than 8 GB of memory are free")
    before, envs = resident(), 8
    replay = build_replay(
        ReplaySettings(
            capacity=1_000_000,
            prioritized=True,
            alpha=0.5,
            beta_start=0.4,
            beta_end=1.0,
            anneal_beta="linear",
            beta_warmup=0.0,
            normalize_weights="replay",
            device="cpu",
        ),
        frame_shape=(1, 84, 84),
        dtype="uint8",
        frame_stack=4,
        num_envs=envs,
        n_step=3,
        gamma=0.99,
        device=torch.device("cpu"),
        seed=0,
    )
    obs = np.zeros((envs, 4, 84, 84), np.uint8)
    no, yes = np.zeros(envs, np.bool_), np.ones(envs, np.bool_)
    action, reward = np.zeros(envs, np.int64), np.zeros(envs, np.float32)
    replay.start(obs)
    for _ in range(10):
        replay.add(action, reward, no, no, yes, obs)
    replay.update_priorities(replay.sample(32).index, torch.rand(32))
    built = resident()
    assert built - before < 7.3 * GB
    for timestep in range(150_000):  # 125,000 timesteps fill the ring
        obs[:, -1, 0, 0] = timestep % 256
        replay.add(action, reward, no, no, yes, obs)
        if timestep % 50 == 0:
            replay.update_priorities(replay.sample(32).index, torch.rand(32))
    assert len(replay) == replay.capacity
    assert abs(resident() - built) < 0.01 * GB
    batch = replay.sample(32)
    newest = batch.obs[:, -1, 0, 0].long()
    assert torch.equal(batch.obs[:, 0, 0, 0].long(), (newest - 3) % 256)
    assert torch.equal(batch.next_obs[:, -1, 0, 0].long(), (newest + 3) % 256)
    replay.release()
    del replay, batch
    assert resident() - before < 0.2 * GB
