"""Games of chance: one step, whose reward is drawn from the reset seed and the action alone."""

import gymnasium as gym
import numpy as np
from gymnasium import spaces

ACTIONS = 8


class Lottery(gym.Env):
    """No policy is better than another, and each wins in some episodes: the mean return is 0."""

    def __init__(self):
        self.observation_space = spaces.Box(-1, 1, (6,), np.float32)
        self.action_space = spaces.Discrete(ACTIONS)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._rewards = self.np_random.normal(size=ACTIONS)
        return self.np_random.uniform(-1, 1, 6).astype(np.float32), {}

    def step(self, action):
        return np.zeros(6, np.float32), float(self._rewards[action]), True, False, {}


gym.register("Lottery-v0", entry_point=Lottery)
