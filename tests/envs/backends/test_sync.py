"""The sync backend equals Gymnasium's SyncVectorEnv."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from toy_environments import settings

from steadyrl.envs.backends.single_env import episode_seed
from steadyrl.envs.factory import build_env


class Reseeded(gym.Wrapper):
    """Seed every episode as our backends do."""

    def __init__(self, env, index):
        super().__init__(env)
        self._index, self._episode = index, -1

    def reset(self, *, seed=None, options=None):
        self._episode += 1
        return self.env.reset(seed=episode_seed(5, self._index, self._episode))


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Acrobot-v1", "Pendulum-v1", "MountainCar-v0"])
def test_sync_steps_equal_gymnasiums(env_id, num_envs):
    theirs = SyncVectorEnv(
        [lambda i=i: Reseeded(gym.make(env_id), i) for i in range(num_envs)],
        autoreset_mode=AutoresetMode.NEXT_STEP,
    )
    rng = np.random.default_rng(0)
    with build_env(settings(env_id, num_envs=num_envs), seed=5) as ours:
        np.testing.assert_array_equal(ours.reset(), theirs.reset()[0])
        done = np.zeros(num_envs, bool)
        for _ in range(450):
            if env_id == "Pendulum-v1":
                action = rng.uniform(-2, 2, (num_envs, 1)).astype(np.float32)
            else:
                action = rng.integers(0, 2, num_envs)
            step = ours.step(action)
            obs, reward, terminated, truncated, _ = theirs.step(action)
            np.testing.assert_array_equal(step.obs, obs)
            np.testing.assert_array_equal(step.reward, reward.astype(np.float32))
            np.testing.assert_array_equal(step.terminated, terminated)
            np.testing.assert_array_equal(step.truncated, truncated)
            np.testing.assert_array_equal(step.valid, ~done)
            done = terminated | truncated
    theirs.close()
