"""An environment that can be drawn in a window, for `env.id=drawn_envs:Drawn-v0`."""

from typing import ClassVar

import gymnasium as gym
import numpy as np


class Drawn(gym.Env):
    """Draws nothing, but accepts to."""

    metadata: ClassVar = {"render_modes": ["human"]}
    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def render(self):
        pass


gym.register("Drawn-v0", Drawn)
