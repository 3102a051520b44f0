"""An environment kernel with predictable outputs: the counter of `toy_environments`."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from steadyrl.core.jit import jit
from steadyrl.envs.kernels.api import KernelEntry
from steadyrl.envs.kernels.kernel import Kernel
from steadyrl.envs.kernels.pcg64 import integers
from steadyrl.envs.kernels.state import NEEDS_RESET, begin_episode, record_step

COUNTED = "own_kernels:Counted-v0"  # terminates after 1 to 4 steps, truncated after 3
MARKS = 2**22  # number of episode ids, exact in float32


def counted(length=0):
    ranges = ((0, 2**31), (1, 2**31), (0, MARKS - 1))
    return Kernel(step, (3,), spaces.Discrete(3), int_state=ranges, constants=(length,))


@jit
def step(sim, action, outcome):
    """Observe (steps, last action, episode id); the reward is the step number."""
    for env in range(len(action)):
        state, obs = sim.int_state[env], outcome.obs[env]
        if sim.clock[env, NEEDS_RESET]:
            begin_episode(sim, outcome, env)
            drawn = integers(sim.generators[env], 1, 5)
            state[0], state[1] = 0, int(sim.constants[0]) or drawn
            state[2] = integers(sim.generators[env], 0, MARKS)
            obs[1] = -1
        else:
            state[0] += 1
            obs[1] = action[env]
            record_step(sim, outcome, env, state[0], state[0] == state[1])
        obs[0], obs[2] = state[0], state[2]


def broken():
    return Kernel(worn_out, (3,), spaces.Discrete(3))


def worn_out(sim, action, outcome):
    raise RuntimeError("worn\nout")


def chosen(first=0):
    return Kernel(choose, (1,), spaces.Discrete(3, start=first))


@jit
def choose(sim, action, outcome):
    """Observe the action; it is the reward too."""
    for env in range(len(action)):
        if sim.clock[env, NEEDS_RESET]:
            begin_episode(sim, outcome, env)
            outcome.obs[env, 0] = -1
        else:
            record_step(sim, outcome, env, action[env], False)
            outcome.obs[env, 0] = action[env]


def reached(shape=(2, 2)):
    return Kernel(reach, (1,), spaces.Box(-2, 3, tuple(shape)))


@jit
def reach(sim, action, outcome):
    """Observe the sum of the clipped actions; it is the reward too."""
    for env in range(len(action)):
        total = np.float32(0)
        for part in range(action.shape[1]):
            total += min(max(action[env, part], np.float32(-2)), np.float32(3))
        if sim.clock[env, NEEDS_RESET]:
            begin_episode(sim, outcome, env)
            total = np.float32(0)
        else:
            record_step(sim, outcome, env, total, False)
        outcome.obs[env, 0] = total


gym.register("Chosen-v0", entry_point=KernelEntry(chosen), max_episode_steps=5)
gym.register("Reached-v0", entry_point=KernelEntry(reached), max_episode_steps=5)
gym.register("Counted-v0", entry_point=KernelEntry(counted), max_episode_steps=3)
gym.register("Broken-v0", entry_point=KernelEntry(broken))
