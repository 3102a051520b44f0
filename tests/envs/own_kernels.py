"""A kernel whose every row can be foretold: the counter of `toy_environments`."""

from __future__ import annotations

import gymnasium as gym
from gymnasium import spaces

from envs.kernel import Kernel, KernelEntry
from envs.kernel_random import integers
from envs.kernel_steps import OVER, begin, finish
from memory.compiled import compiled

COUNTED = "own_kernels:Counted-v0"  # ends after 1 to 4 steps, and is cut after 3
MARKS = 2**22  # so many marks tell episodes apart, and float32 holds them


def counted(length=0):
    return Kernel(step, (3,), spaces.Discrete(3), wholes=3, constants=(length,))


@compiled
def step(sim, action, row):
    """Observe (steps, last action, the episode's mark); the reward is the step's number."""
    for env in range(len(action)):
        state, obs = sim.wholes[env], row.obs[env]
        if sim.clock[env, OVER]:
            begin(sim, row, env)
            drawn = integers(sim.generators[env], 1, 5)
            state[0], state[1] = 0, int(sim.constants[0]) or drawn
            state[2] = integers(sim.generators[env], 0, MARKS)
            obs[1] = -1
        else:
            state[0] += 1
            obs[1] = action[env]
            finish(sim, row, env, state[0], state[0] == state[1])
        obs[0], obs[2] = state[0], state[2]


def broken():
    return Kernel(worn_out, (3,), spaces.Discrete(3))


def worn_out(sim, action, row):
    raise RuntimeError("worn\nout")


gym.register("Counted-v0", entry_point=KernelEntry(counted), max_episode_steps=3)
gym.register("Broken-v0", entry_point=KernelEntry(broken))
