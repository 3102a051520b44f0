"""An environment and a callback that wait at gates, so that a test sees what a run is doing."""

import gymnasium as gym
import numpy as np
from gate import gate

from steadyrl import Callback


class Gated(gym.Env):
    """Episodes of three steps; building, resetting, stepping and rendering may wait.

    The first of a process is built to read the spaces, the next one trains, the third evaluates.
    """

    built = 0

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012

    def __init__(self, render_mode=None):
        self.render_mode = render_mode
        Gated.built += 1
        self._number = Gated.built
        gate(f"build-{self._number}")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._left = 3
        gate(f"reset-{self._number}")
        return np.zeros(2, np.float32), {}

    def step(self, action):
        gate(f"step-{self._number}")
        self._left -= 1
        return np.zeros(2, np.float32), 1.0, not self._left, False, {}

    def render(self):
        gate("render")
        return np.zeros((32, 32, 3), np.uint8)


class Waits(Callback):
    """Waits at each step and checkpoint."""

    def on_step(self, run):
        gate(f"after-{run.step}")

    def on_checkpoint(self, run):
        gate("checkpoint")

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        gate("load")


gym.register("Gated-v0", Gated)
