"""Pendulum as a kernel: Gymnasium's equations in Gymnasium's order and precision."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from steadyrl.core.jit import jit
from steadyrl.envs.kernels.kernel import Kernel
from steadyrl.envs.kernels.pcg64 import uniform
from steadyrl.envs.kernels.state import NEEDS_RESET, Outcome, Simulation, begin_episode, record_step

SECONDS, FASTEST, STRONGEST = 0.05, 8.0, np.float32(2.0)
# The angle is never wrapped: bounded by the maximum speed times the longest run.
RANGES = ((-1e15, 1e15), (-FASTEST, FASTEST))
PULL, SQUARE = 0, 1  # indices of the constants
COST, GAIN = np.float32(0.001), np.float32(3.0)  # torques and their products are float32


def pendulum(g: float = 10.0) -> Kernel:
    """Return the kernel of Pendulum."""
    # The exponent is data, so that the compiler calls pow() like NumPy: x * x differs in the last
    # bit for one argument in a thousand.
    action = spaces.Box(-STRONGEST, STRONGEST, (1,), np.float32)
    return Kernel(step, (3,), action, float_state=RANGES, constants=(3 * g / (2 * 1.0), 2.0))


@jit
def step(sim: Simulation, action: NDArray[Any], outcome: Outcome) -> None:
    """Step all N environments."""
    for env in range(len(action)):
        state = sim.float_state[env]
        if sim.clock[env, NEEDS_RESET]:
            begin_episode(sim, outcome, env)
            state[0] = uniform(sim.generators[env], -math.pi, math.pi)
            state[1] = uniform(sim.generators[env], -1.0, 1.0)
        else:
            torque = min(max(action[env, 0], -STRONGEST), STRONGEST)
            cost = _turn(state, torque, sim.constants)
            record_step(sim, outcome, env, -cost, False)
        outcome.obs[env, 0] = math.cos(state[0])
        outcome.obs[env, 1] = math.sin(state[0])
        outcome.obs[env, 2] = state[1]


@jit
def _turn(state: NDArray[Any], torque: Any, constants: NDArray[Any]) -> float:
    angle, speed, square = state[0], state[1], constants[SQUARE]
    upright = ((angle + math.pi) % (2 * math.pi)) - math.pi
    cost: float = upright**square + 0.1 * speed**square + COST * torque ** np.float32(square)
    pushed = np.float32(GAIN * torque)
    speed = speed + (constants[PULL] * math.sin(angle) + pushed) * SECONDS
    speed = min(max(speed, -FASTEST), FASTEST)
    state[0], state[1] = angle + speed * SECONDS, speed
    return cost
