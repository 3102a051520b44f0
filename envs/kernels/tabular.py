"""FrozenLake, CliffWalking and Taxi as one kernel over Gymnasium's transition tables.

The constants are K (largest number of outcomes of an action), the number of actions, the cumulative
initial state distribution [S], and a table [S, A, K, 4]: cumulative probability, next state, reward
and termination of each outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.envs.toy_text.cliffwalking import CliffWalkingEnv
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from gymnasium.envs.toy_text.taxi import TaxiEnv
from numpy.typing import NDArray

from steadyrl.core.jit import jit
from steadyrl.envs.kernels.kernel import Kernel
from steadyrl.envs.kernels.pcg64 import random
from steadyrl.envs.kernels.state import NEEDS_RESET, Outcome, Simulation, begin_episode, record_step

OUTCOMES, ACTIONS, STARTS = range(3)  # offsets in the constants
CHANCE, NEXT, REWARD, ENDS, WIDTH = range(5)


def _table(environment: Callable[..., Any], **kwargs: Any) -> Kernel:
    env = environment(**kwargs)
    states, actions = int(env.observation_space.n), int(env.action_space.n)
    most = max(len(env.P[s][a]) for s in range(states) for a in range(actions))
    table = np.zeros((states, actions, most, WIDTH))
    for state in range(states):
        for action in range(actions):
            outcomes = np.array(env.P[state][action], np.float64)
            outcomes[:, CHANCE] = np.cumsum(outcomes[:, CHANCE])
            table[state, action, : len(outcomes)] = outcomes
    starts = np.cumsum(env.initial_state_distrib)
    constants = np.concatenate([[most, actions], starts, table.reshape(-1)])
    here = ((0, states - 1),)
    return Kernel(
        step, (states,), spaces.Discrete(actions), int_state=here, constants=constants, one_hot=True
    )


frozen_lake = partial(_table, FrozenLakeEnv)
cliff_walking = partial(_table, CliffWalkingEnv)
taxi = partial(_table, TaxiEnv)


@jit
def step(sim: Simulation, action: NDArray[Any], outcome: Outcome) -> None:
    """Step all N environments."""
    table, states = sim.constants, outcome.obs.shape[1]
    most, actions = int(table[OUTCOMES]), int(table[ACTIONS])
    for env in range(len(action)):
        drawn, state = 0.0, sim.int_state[env, 0]
        if sim.clock[env, NEEDS_RESET]:
            begin_episode(sim, outcome, env)
            drawn = random(sim.generators[env])
            state = _first_above(table, STARTS, 1, states, drawn)
        else:
            drawn = random(sim.generators[env])
            at = STARTS + states + (state * actions + action[env]) * most * WIDTH
            at += WIDTH * _first_above(table, at, WIDTH, most, drawn)
            state = int(table[at + NEXT])
            record_step(sim, outcome, env, table[at + REWARD], table[at + ENDS] > 0)
        sim.int_state[env, 0] = state
        for i in range(states):
            outcome.obs[env, i] = 0.0
        outcome.obs[env, state] = 1.0


@jit
def _first_above(table: NDArray[Any], at: int, stride: int, count: int, drawn: float) -> int:
    """Return the index of the first of `count` numbers above `drawn`; 0 if there is none."""
    for i in range(count):
        if table[at + stride * i] > drawn:
            return i
    return 0
