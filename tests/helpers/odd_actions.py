"""An environment of a chosen action space; all have six outputs (a joint one of several)."""

import gymnasium as gym
import numpy as np
from gymnasium import spaces

ACTIONS = {
    "one": spaces.Discrete(6),
    "binary": spaces.MultiBinary(6),
    "several": spaces.MultiDiscrete([2, 3]),
    "narrow": spaces.Box(-1, 1, (6,), np.float32),
    "wide": spaces.Box(-9, 9, (6,), np.float32),
}


class Odd(gym.Env):
    """Episodes of 20 steps of random observations; `masked`: with an action mask in `info`."""

    observation_space = spaces.Box(-1, 1, (3,), np.float32)

    def __init__(self, kind="one", masked=False):
        self.action_space, self._masked, self._step = ACTIONS[kind], masked, 0

    def _seen(self):
        info = {"action_mask": np.ones(6, np.int8)} if self._masked else {}
        return self.np_random.uniform(-1, 1, 3).astype(np.float32), info

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._step = 0
        return self._seen()

    def step(self, action):
        self._step += 1
        obs, info = self._seen()
        return obs, 1.0, False, self._step >= 20, info


gym.register("Odd-v0", entry_point=Odd)
