"""Errors from a device set priorities one update late, and only of what is still there."""

import numpy as np
import pytest
import torch
from replay_factory import CPU, make_replay
from synthetic_envs import EnvConfig, SyntheticEnvs

from steadyrl.buffers.replay.delayed_priorities import DelayedPriorities

SCENE = EnvConfig(num_envs=2, frame_shape=(3,), dtype="float32", frame_stack=1, crash_rate=0.0)


def started(traffic):
    replay, _ = make_replay("host", SCENE, 6, 2, 0.9, True)
    replay.start(traffic.first())
    return replay


def delayed():
    replay = started(SyntheticEnvs(SCENE, 3))
    replay._delayed = DelayedPriorities(CPU)
    return replay


def errors(turn):
    return torch.from_numpy(np.random.default_rng(turn).random(4) * 3)


def leaves(replay):
    return replay.metadata()["priorities"]["leaves"].clone()


def test_they_are_set_one_update_late_unless_the_transition_is_gone():
    ours, naive, traffic = delayed(), started(SyntheticEnvs(SCENE, 3)), SyntheticEnvs(SCENE, 3)
    traffic.first()
    waiting, left_out = None, 0
    for turn in range(80):
        row = traffic.step()
        for replay in (ours, naive):
            replay.add(*row)
        if turn % 3 or not len(ours):
            continue
        drawn = ours.sample(4).index
        naive.sample(4)
        if waiting is not None:
            index, error, frames = waiting
            same = (naive._frames_flat[index] == frames).all(1)
            left_out += (~same).sum()
            naive.update_priorities(torch.from_numpy(index[same]), error[same])
        ours.update_priorities(drawn, errors(turn))
        kept = drawn.numpy().copy()
        waiting = kept, errors(turn), naive._frames_flat[kept].copy()
        assert torch.equal(leaves(ours), leaves(naive)), turn
    assert left_out > 3


@pytest.mark.parametrize("at_once", [False, True], ids=["again late", "where nothing is late"])
def test_what_was_on_its_way_is_saved(at_once):
    straight, traffic = delayed(), SyntheticEnvs(SCENE, 3)
    traffic.first()
    for turn in range(10):
        straight.add(*traffic.step())
        if len(straight):
            straight.update_priorities(straight.sample(4).index, errors(turn))
    resumed = started(SyntheticEnvs(SCENE, 3)) if at_once else delayed()
    before = leaves(straight)
    resumed.load_state_dict(straight.state_dict())
    assert at_once != torch.equal(leaves(resumed), before)
    row = traffic.step()
    for replay in (straight, resumed):
        replay.add(*row)
        index = replay.sample(4).index
        replay.update_priorities(index, errors(99))
    if not at_once:
        assert torch.equal(straight.sample(4).index, resumed.sample(4).index)
        assert torch.equal(leaves(straight), leaves(resumed))


def test_what_is_cleared_forgets_what_was_on_its_way():
    replay, traffic = delayed(), SyntheticEnvs(SCENE, 3)
    traffic.first()
    for _ in range(5):
        replay.add(*traffic.step())
    replay.update_priorities(replay.sample(4).index, errors(0))
    replay.clear()
    assert replay.metadata()["delayed"]["index"].tolist() == []
