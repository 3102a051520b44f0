"""TD errors from a device set priorities one update late, unless the transition was evicted."""

import numpy as np
import pytest
import torch
from replay_factory import CPU, make_replay
from synthetic_envs import EnvConfig, SyntheticEnvs

from steadyrl.buffers.replay.delayed_priorities import DelayedPriorities

SCENE = EnvConfig(num_envs=2, frame_shape=(3,), dtype="float32", frame_stack=1, crash_rate=0.0)


def started(envs):
    replay, _ = make_replay("host", SCENE, 6, 2, 0.9, True)
    replay.start(envs.first())
    return replay


def delayed():
    replay = started(SyntheticEnvs(SCENE, 3))
    replay._delayed = DelayedPriorities(CPU)
    return replay


def errors(iteration):
    return torch.from_numpy(np.random.default_rng(iteration).random(4) * 3)


def leaves(replay):
    return replay.metadata()["priorities"]["leaves"].clone()


def test_priorities_are_set_one_update_late_unless_evicted():
    ours, naive, envs = delayed(), started(SyntheticEnvs(SCENE, 3)), SyntheticEnvs(SCENE, 3)
    envs.first()
    waiting, left_out = None, 0
    for iteration in range(80):
        timestep = envs.step()
        for replay in (ours, naive):
            replay.add(*timestep)
        if iteration % 3 or not len(ours):
            continue
        drawn = ours.sample(4).index
        naive.sample(4)
        if waiting is not None:
            index, error, frames = waiting
            same = (naive._frames_flat[index] == frames).all(1)
            left_out += (~same).sum()
            naive.update_priorities(torch.from_numpy(index[same]), error[same])
        ours.update_priorities(drawn, errors(iteration))
        sampled = drawn.numpy().copy()
        waiting = sampled, errors(iteration), naive._frames_flat[sampled].copy()
        assert torch.equal(leaves(ours), leaves(naive)), iteration
    assert left_out > 3


@pytest.mark.parametrize("immediate", [False, True], ids=["delayed again", "resumed without delay"])
def test_pending_priorities_are_saved(immediate):
    straight, envs = delayed(), SyntheticEnvs(SCENE, 3)
    envs.first()
    for iteration in range(10):
        straight.add(*envs.step())
        if len(straight):
            straight.update_priorities(straight.sample(4).index, errors(iteration))
    resumed = started(SyntheticEnvs(SCENE, 3)) if immediate else delayed()
    before = leaves(straight)
    resumed.load_state_dict(straight.state_dict())
    assert immediate != torch.equal(leaves(resumed), before)
    timestep = envs.step()
    for replay in (straight, resumed):
        replay.add(*timestep)
        index = replay.sample(4).index
        replay.update_priorities(index, errors(99))
    if not immediate:
        assert torch.equal(straight.sample(4).index, resumed.sample(4).index)
        assert torch.equal(leaves(straight), leaves(resumed))


def test_clearing_drops_pending_priorities():
    replay, envs = delayed(), SyntheticEnvs(SCENE, 3)
    envs.first()
    for _ in range(5):
        replay.add(*envs.step())
    replay.update_priorities(replay.sample(4).index, errors(0))
    replay.clear()
    assert replay.metadata()["delayed"]["index"].tolist() == []
