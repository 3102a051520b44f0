"""Images declared as 0 to 255 with only two values; as environment, batch and kernel."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from steadyrl.core.jit import jit
from steadyrl.envs.kernels.api import KernelEntry
from steadyrl.envs.kernels.kernel import Kernel
from steadyrl.envs.kernels.state import NEEDS_RESET, begin_episode, record_step

SPACE = spaces.Box(0, 255, (9, 9, 3), np.uint8)


def image(time, bright):
    """Return a board with one bright element."""
    board = np.zeros(SPACE.shape, np.uint8)
    board[time % 9, 0, 0] = bright
    return board


class Dim(gym.Env):
    """Shows a board of 0 and `bright`."""

    observation_space, action_space = SPACE, spaces.Discrete(2)

    def __init__(self, bright=1):
        self.bright, self.time = bright, 0

    def action_masks(self):
        return np.array([True, False])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return image(0, self.bright), {}

    def step(self, action):
        self.time += 1
        return image(self.time, self.bright), 1.0, False, self.time % 50 == 0, {}


class DimBatch(gym.vector.VectorEnv):
    """The same as a batched environment."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012
    single_observation_space, single_action_space = SPACE, spaces.Discrete(2)

    def __init__(self, num_envs=1):
        self.num_envs, self.time = num_envs, 0
        self.observation_space = gym.vector.utils.batch_space(SPACE, num_envs)
        self.action_space = gym.vector.utils.batch_space(spaces.Discrete(2), num_envs)

    def show(self):
        return np.stack([image(self.time, 1)] * self.num_envs)

    def reset(self, *, seed=None, options=None):
        return self.show(), {}

    def step(self, actions):
        self.time += 1
        n = self.num_envs
        return self.show(), np.ones(n), np.zeros(n, bool), np.zeros(n, bool), {}


def dim_kernel():
    """Return a kernel with channels first, which its shape does not show."""
    return Kernel(step, (9, 10, 14), spaces.Discrete(2), images=True)


@jit
def step(sim, action, outcome):
    """Show black and, after an action, one element of value 1."""
    for env in range(len(action)):
        outcome.obs[env] = 0
        if sim.clock[env, NEEDS_RESET]:
            begin_episode(sim, outcome, env)
        else:
            outcome.obs[env, 0, 0, 0] = 1
            record_step(sim, outcome, env, 1.0, False)


gym.register("Dim-v0", Dim, vector_entry_point=DimBatch)
gym.register("DimKernel-v0", KernelEntry(dim_kernel))
