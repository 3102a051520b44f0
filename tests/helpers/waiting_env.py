"""An environment whose steps wait for the learner, for `env.id=waiting_env:Waiting-v0`."""

from pathlib import Path

import gymnasium as gym
import numpy as np


class Waiting(gym.Env):
    """Each step blocks until the pipe is written to."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, pipe):
        self.pipe = Path(pipe)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.pipe.read_bytes()
        return np.zeros(2, np.float32), 1.0, False, False, {}


gym.register("Waiting-v0", Waiting)
