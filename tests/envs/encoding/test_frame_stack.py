"""Stacks hold frames of one episode only, oldest first."""

from __future__ import annotations

import numpy as np
import pytest
from toy_environments import settings

from steadyrl.envs.factory import build_env


@pytest.mark.parametrize("k", [2, 4])
def test_stacks_equal_the_last_frames_of_a_list(k):
    with build_env(settings(num_envs=3, frame_stack=k), seed=0) as env:
        assert env.spec.observation_shape == (3 * k,)
        obs = env.reset()
        frames = [[obs[i, -3:].copy()] for i in range(3)]
        for _ in range(50):
            before = obs.copy()
            step = env.step(np.ones(3, np.int64))
            np.testing.assert_array_equal(obs, before)
            obs = step.obs
            for i in range(3):
                if not step.valid[i]:
                    frames[i] = []
                frames[i].append(obs[i, -3:].copy())
                last = frames[i][-k:]
                expected = [last[0]] * (k - len(last)) + last
                np.testing.assert_array_equal(obs[i], np.concatenate(expected))


def test_reset_repeats_the_first_frame():
    with build_env(settings(frame_stack=3), seed=0) as env:
        obs = env.reset()
        np.testing.assert_array_equal(obs, np.tile(obs[:, :3], 3))
