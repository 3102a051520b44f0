"""Environments whose steps become slower, for `env.id=slowing_envs:Slowing-v0`."""

import time

import gymnasium as gym
import numpy as np


class Slowing(gym.Env):
    """Episodes of 50 steps; a step waits `seconds` more after `steps` steps, growing evenly.

    With `after`, it waits them from that step on, and not before. `works`: it computes meanwhile.
    """

    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, seconds=0.0, steps=20_000, after=None, works=False):
        self._seconds, self._steps, self._after, self._works = seconds, steps, after, works
        self._count = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._begin = self._count
        return np.zeros(4, np.float32), {}

    def step(self, action):
        self._count += 1
        wait = self._seconds * min(1.0, self._count / self._steps)
        if self._after is not None:
            wait = self._seconds if self._count > self._after else 0.0
        if self._works:
            end = time.thread_time() + wait
            while time.thread_time() < end:
                pass
        elif wait:
            time.sleep(wait)
        over = self._count - self._begin >= 50
        return np.zeros(4, np.float32), 1.0, over, False, {}


gym.register("Slowing-v0", Slowing)
