"""A memory task: the first observation shows a bit, the last action must repeat it."""

import gymnasium as gym
import numpy as np


class FirstBit(gym.Env):
    """Observes (±1, 0), then (0, 0), at last (0, 1); the last action should be the bit."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, steps=40):
        self.steps = steps

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.bit, self.step_ = int(self.np_random.integers(2)), 0
        return np.array([2 * self.bit - 1, 0], np.float32), {}

    def step(self, action):
        asked = self.step_ == self.steps
        self.step_ += 1
        seen = np.array([0, self.step_ == self.steps], np.float32)
        return seen, float(asked and action == self.bit), asked, False, {}


gym.register("FirstBit-v0", FirstBit)
