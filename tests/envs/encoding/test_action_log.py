"""The action log returns the actions of running episodes, within bounded memory."""

from __future__ import annotations

import numpy as np
import pytest

from steadyrl.envs.encoding.action_log import FIRST_CAPACITY, ActionLog


def test_environments_have_separate_episodes():
    log = ActionLog(2)
    for t in range(10):
        log.append(np.array([t, -t]))
        if t == 6:
            log.begin_episode(1)
    assert log.episode(0).tolist() == list(range(10))
    assert log.episode(1).tolist() == [-7, -8, -9]


@pytest.mark.parametrize("period", [1, 100, 3 * FIRST_CAPACITY])
def test_the_log_equals_a_list_over_many_episodes(period):
    log = ActionLog(2)
    lists = [[], []]
    for t in range(8 * FIRST_CAPACITY):
        log.append(np.array([[t, 0.5], [t, -0.5]], np.float32))
        for env, actions in enumerate(lists):
            actions.append(t)
            if t % (period + env) == 0:
                actions.clear()
                log.begin_episode(env)
        if t % 997 == 0:
            for env, actions in enumerate(lists):
                assert log.episode(env)[:, 0].tolist() == actions
    assert log._actions.nbytes <= 16 * max(8 * period, 4 * FIRST_CAPACITY)


def test_an_episode_beyond_max_bytes_is_dropped_and_the_next_logged():
    log = ActionLog(2, max_bytes=16 * FIRST_CAPACITY)
    log.append(np.array([0, 0]))
    log.begin_episode(1)
    for t in range(5 * FIRST_CAPACITY):
        log.append(np.array([t, t]))
        if t % 300 == 0:
            log.begin_episode(1)
    assert log._actions.nbytes <= 16 * FIRST_CAPACITY
    assert log.episode(0) is None
    assert log.episode(1).tolist() == list(range(t // 300 * 300 + 1, t + 1))
    log.begin_episode(0)
    log.append(np.array([5, 6]))
    assert log.episode(0).tolist() == [5]


@pytest.mark.parametrize("loaded", [0, 100, 700])
def test_only_episodes_beyond_half_of_the_log_are_dropped(loaded):
    log = ActionLog(1, max_bytes=8 * FIRST_CAPACITY)
    if loaded:
        log.load([np.zeros(loaded, np.int64)])
    length = loaded
    while log.episode(0) is not None:
        log.append(np.zeros(1, np.int64))
        length += 1
    assert log.shortest_dropped(8) <= length <= FIRST_CAPACITY + 1
    assert log.shortest_dropped(8) == FIRST_CAPACITY // 4


def test_loaded_episodes_are_continued():
    log = ActionLog(3)
    log.load([np.array([1, 2, 3]), None, np.array([9])])
    log.append(np.array([4, 5, 6]))
    assert log.episode(0).tolist() == [1, 2, 3, 4]
    assert log.episode(1) is None
    assert log.episode(2).tolist() == [9, 6]
