"""An environment that signals a run's progress, for `env.id=telling_env:Telling-v0`."""

import os
from pathlib import Path

import gymnasium as gym
import numpy as np


class Telling(gym.Env):
    """Appends a byte to a file when built, or at its n-th step or reset.

    Episodes have ten steps. With `hold`, construction never returns.
    """

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, file, made=False, hold=False, steps=0, resets=0):
        self.file = Path(file)
        self.steps, self.resets, self.time = steps, resets, 0
        if made:
            self.tell()
        if hold:
            os.read(os.pipe()[0], 1)

    def tell(self):
        with self.file.open("ab") as file:
            file.write(b".")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        self.resets -= 1
        if self.resets == 0:
            self.tell()
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.time += 1
        self.steps -= 1
        if self.steps == 0:
            self.tell()
        observation = np.full(2, self.np_random.uniform(-1, 1), np.float32)
        return observation, 1.0, self.time == 10, False, {}


gym.register("Telling-v0", Telling)
