"""Example spaces of every numeric kind, and observations of them."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

SIDE = 9


def per_element():
    high = np.full((SIDE, SIDE, 3), 1, np.uint8)
    high[..., 1], high[0, 0, 0] = 7, 200
    return spaces.Box(np.zeros_like(high), high, dtype=np.uint8)


def per_channel():
    low, high = np.zeros((SIDE, SIDE, 3), np.int16), np.ones((SIDE, SIDE, 3), np.int16)
    low[..., 0], high[..., 2] = -1000, 300
    return spaces.Box(low, high, dtype=np.int16)


def box(low, high, dtype, shape=(SIDE, SIDE, 2)):
    return spaces.Box(low, high, shape, dtype)


# kind -> space; images, and spaces that are not images
IMAGES = {
    "bytes": box(0, 255, np.uint8),
    "bytes, channels first": box(0, 255, np.uint8, (2, SIDE, SIDE)),
    "grey bytes": box(0, 255, np.uint8, (SIDE, SIDE)),
    "board of bytes": box(0, 1, np.uint8),
    "planes of bytes": box(0, 12, np.uint8),
    "board of signed bytes": box(0, 1, np.int8),
    "signed bytes": box(-128, 127, np.int8),
    "pieces": box(-6, 6, np.int64),
    "depth": box(0, 65535, np.uint16),
    "int32": box(0, 1000, np.int32),
    "truth": box(0, 1, np.bool_),
    "float": box(0, 1, np.float32),
    "float, below zero": box(-1, 1, np.float64),
    "half": box(-100, 100, np.float16),
    "more channels than rows": box(0, 1, np.uint8, (4, 4, 16)),
    "many planes first": box(0, 255, np.uint8, (16, 12, 12)),
    "wide": box(0, 255, np.uint8, (9, 10, 14)),
    "per element": per_element(),
    "per channel": per_channel(),
}
VECTORS = {
    "vector": box(-np.inf, np.inf, np.float32, (4,)),
    "vector of bytes": box(0, 255, np.uint8, (5,)),
    "small table": box(0, 3, np.int64, (2, 3, 2)),
    "no bounds": box(-np.inf, np.inf, np.float32),
    "wide reals": box(-1e6, 1e6, np.float32),
    "all reals of half": box(-6e4, 6e4, np.float16),
    "wide whole numbers": box(-(10**6), 10**6, np.int32),
    "scalar": box(-1, 1, np.float32, ()),
    "discrete": spaces.Discrete(4, start=-1),
    "multi discrete": spaces.MultiDiscrete([[2, 3], [4, 2]]),
    "multi binary": spaces.MultiBinary([2, 3]),
    "dict": spaces.Dict(a=spaces.Discrete(3), b=box(0, 255, np.uint8, (2, 2))),
    "tuple": spaces.Tuple([spaces.MultiBinary(2), spaces.Dict(x=box(-1, 1, np.float32, (2,)))]),
}
SPACES = IMAGES | VECTORS
LENGTH = 5


def sample(kind, env, step):
    """Return the observation of environment `env` at step `step` of an episode."""
    space = SPACES[kind]
    space.seed(100 * env + step)
    return space.sample()


class Show(gym.Env):
    """Shows samples of a space, whatever the action."""

    def __init__(self, kind):
        self.kind = kind
        self.observation_space, self.action_space = SPACES[kind], spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return sample(self.kind, 0, 0), {}

    def step(self, action):
        self.time += 1
        return sample(self.kind, 0, self.time), 1.0, self.time == LENGTH, False, {}


class ShowBatch(gym.vector.VectorEnv):
    """The same as a batched environment; all show the same."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs=1, kind=None):
        self.num_envs, self.kind = num_envs, kind
        self.single_observation_space, self.single_action_space = SPACES[kind], spaces.Discrete(2)
        self.observation_space = gym.vector.utils.batch_space(SPACES[kind], num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)

    def _show(self):
        shown = [sample(self.kind, 0, self.time)] * self.num_envs
        empty = gym.vector.utils.create_empty_array(SPACES[self.kind], self.num_envs)
        return gym.vector.utils.concatenate(SPACES[self.kind], shown, empty)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self._show(), {}

    def step(self, actions):
        self.time = 0 if self.time == LENGTH else self.time + 1
        n = self.num_envs
        return self._show(), np.ones(n), np.full(n, self.time == LENGTH), np.zeros(n, bool), {}


gym.register("Show-v0", Show, vector_entry_point=ShowBatch)
