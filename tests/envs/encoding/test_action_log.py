"""The log gives back the actions of the episode under way, and stays bounded."""

from __future__ import annotations

import numpy as np
import pytest

from steadyrl.envs.encoding.action_log import FIRST_CAPACITY, ActionLog


def test_each_environment_has_its_own_episode():
    log = ActionLog(2)
    for row in range(10):
        log.append(np.array([row, -row]))
        if row == 6:
            log.begin_episode(1)
    assert log.episode(0).tolist() == list(range(10))
    assert log.episode(1).tolist() == [-7, -8, -9]


@pytest.mark.parametrize("period", [1, 100, 3 * FIRST_CAPACITY])
def test_it_agrees_with_a_list_over_many_episodes(period):
    log = ActionLog(2)
    lists = [[], []]
    for row in range(8 * FIRST_CAPACITY):
        log.append(np.array([[row, 0.5], [row, -0.5]], np.float32))
        for env, kept in enumerate(lists):
            kept.append(row)
            if row % (period + env) == 0:
                kept.clear()
                log.begin_episode(env)
        if row % 997 == 0:
            for env, kept in enumerate(lists):
                assert log.episode(env)[:, 0].tolist() == kept
    assert log._actions.nbytes <= 16 * max(8 * period, 4 * FIRST_CAPACITY)


def test_an_episode_too_long_to_keep_is_given_up_and_the_next_is_not():
    log = ActionLog(2, max_bytes=16 * FIRST_CAPACITY)
    log.append(np.array([0, 0]))
    log.begin_episode(1)
    for row in range(5 * FIRST_CAPACITY):
        log.append(np.array([row, row]))
        if row % 300 == 0:
            log.begin_episode(1)
    assert log._actions.nbytes <= 16 * FIRST_CAPACITY
    assert log.episode(0) is None
    assert log.episode(1).tolist() == list(range(row // 300 * 300 + 1, row + 1))
    log.begin_episode(0)
    log.append(np.array([5, 6]))
    assert log.episode(0).tolist() == [5]


def test_loaded_episodes_go_on():
    log = ActionLog(3)
    log.load([np.array([1, 2, 3]), None, np.array([9])])
    log.append(np.array([4, 5, 6]))
    assert log.episode(0).tolist() == [1, 2, 3, 4]
    assert log.episode(1) is None
    assert log.episode(2).tolist() == [9, 6]
