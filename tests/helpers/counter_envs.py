"""Environments whose observations identify the episode and step."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

LONGEST = 7
OBSERVATIONS = spaces.Box(-np.inf, np.inf, (3,), np.float32)


class Stamped(gym.Env):
    """Observes (episode, step, last action); episodes terminate, truncate or both; may crash."""

    def __init__(self, crashes=0.0):
        self.observation_space, self.action_space = OBSERVATIONS, spaces.Discrete(3)
        self._crashes = crashes

    def _see(self, action):
        return np.array([self._episode, self._step, action], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._episode, self._step = seed % 2**22, 0
        self._left = int(self.np_random.integers(1, LONGEST + 1))
        return self._see(-1), {}

    def step(self, action):
        if self.np_random.random() < self._crashes:
            raise RuntimeError("broken")
        self._step += 1
        over = self._step == self._left
        kind = self.np_random.integers(3) if over else -1
        reward = float(self.np_random.normal())
        return self._see(action), reward, kind in (0, 2), kind in (1, 2), {}


class StampedBatch(gym.vector.VectorEnv):
    """The same as a batched environment, with one random generator."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs=1, **_):
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = OBSERVATIONS, spaces.Discrete(3)
        batch = gym.vector.utils.batch_space
        self.observation_space = batch(OBSERVATIONS, num_envs)
        self.action_space = batch(self.single_action_space, num_envs)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        n = self.num_envs
        self._episodes = np.zeros(n)
        self._count = 0
        self._time, self._left = np.zeros(n, int), np.zeros(n, int)
        self._over = np.ones(n, bool)
        return self._begin(np.full(n, -1)), {}

    def _begin(self, actions):
        """Start new episodes where the last have ended."""
        for env in np.flatnonzero(self._over):
            self._count += 1
            self._episodes[env], self._time[env] = self._count, 0
            self._left[env] = self.np_random.integers(1, LONGEST + 1)
        return np.stack([self._episodes, self._time, actions], 1).astype(np.float32)

    def step(self, actions):
        began = self._over.copy()
        self._time += ~began
        seen = self._begin(np.where(began, -1, actions))
        self._over = (self._time == self._left) & ~began
        kind = np.where(self._over, self.np_random.integers(0, 3, self.num_envs), -1)
        reward = np.where(began, 0.0, self.np_random.normal(size=self.num_envs))
        return seen, reward, np.isin(kind, (0, 2)), np.isin(kind, (1, 2)), {}


gym.register("Stamped-v0", Stamped, vector_entry_point=StampedBatch)
