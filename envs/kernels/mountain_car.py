"""The two mountain cars as kernels: Gymnasium's equations in Gymnasium's order and precision."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from steadyrl.core.jit import jit
from steadyrl.envs.kernels.kernel import Kernel
from steadyrl.envs.kernels.pcg64 import uniform
from steadyrl.envs.kernels.state import (
    ELAPSED,
    NEEDS_RESET,
    Outcome,
    Simulation,
    begin_episode,
    record_step,
)

LEFT, RIGHT, FASTEST = -1.2, 0.6, 0.07
FORCE, GRAVITY, GOAL = 0.001, 0.0025, 0.5
POWER, SLOPE = 0.0015, 0.0025
GOAL_VELOCITY = 0  # index of the constant
MARGIN = 1e-6  # float32 bounds may exceed the float64 ones by rounding
RANGES = ((LEFT - MARGIN, RIGHT + MARGIN), (-FASTEST - MARGIN, FASTEST + MARGIN))
F32 = np.float32
DOUBLES = (LEFT, RIGHT, FASTEST, 0.45, 3.0, 0.0)
SINGLES = (F32(LEFT), F32(RIGHT), F32(FASTEST), F32(0.45), F32(3.0), F32(0.0))


def mountain_car(goal_velocity: float = 0) -> Kernel:
    """Return the kernel of MountainCar."""
    return Kernel(step, (2,), spaces.Discrete(3), float_state=RANGES, constants=(goal_velocity,))


def mountain_car_continuous(goal_velocity: float = 0) -> Kernel:
    """Return the kernel of MountainCarContinuous."""
    action = spaces.Box(-1.0, 1.0, (1,), np.float32)
    return Kernel(step_continuous, (2,), action, float_state=RANGES, constants=(goal_velocity,))


@jit
def step(sim: Simulation, action: NDArray[Any], outcome: Outcome) -> None:
    """Step all N environments."""
    for env in range(len(action)):
        state = sim.float_state[env]
        if sim.clock[env, NEEDS_RESET]:
            begin_episode(sim, outcome, env)
            _park(state, sim.generators[env])
        else:
            x, speed = state[0], state[1]
            speed += (action[env] - 1) * FORCE + math.cos(3 * x) * (-GRAVITY)
            speed = min(max(speed, -FASTEST), FASTEST)
            x = min(max(x + speed, LEFT), RIGHT)
            if x == LEFT and speed < 0:
                speed = 0.0
            state[0], state[1] = x, speed
            there = x >= GOAL and speed >= sim.constants[GOAL_VELOCITY]
            record_step(sim, outcome, env, -1.0, there)
        outcome.obs[env, 0], outcome.obs[env, 1] = state[0], state[1]


@jit
def step_continuous(sim: Simulation, action: NDArray[Any], outcome: Outcome) -> None:
    """Step all N environments."""
    for env in range(len(action)):
        state = sim.float_state[env]
        if sim.clock[env, NEEDS_RESET]:
            begin_episode(sim, outcome, env)
            _park(state, sim.generators[env])
        else:
            force = min(max(action[env, 0], F32(-1.0)), F32(1.0))
            there = _drive(state, force, sim.constants[GOAL_VELOCITY], sim.clock[env, ELAPSED] == 0)
            cost = np.float64(force) * np.float64(force) * 0.1
            record_step(sim, outcome, env, (100.0 if there else 0.0) - cost, there)
        outcome.obs[env, 0], outcome.obs[env, 1] = state[0], state[1]


@jit
def _drive(state: NDArray[Any], force: Any, goal: float, first: bool) -> bool:
    """Move the car; an episode's first step is computed in float64, later ones in float32."""
    there: bool
    if first:
        state[0], state[1], there = _moved(state[0], state[1], force, goal, DOUBLES)
    else:
        x, speed = F32(state[0]), F32(state[1])
        state[0], state[1], there = _moved(x, speed, force, F32(goal), SINGLES)
    state[0], state[1] = F32(state[0]), F32(state[1])
    return there


@jit
def _moved(x: Any, speed: Any, force: Any, goal: Any, numbers: Any) -> tuple[Any, Any, bool]:
    left, right, fastest, mark, three, zero = numbers
    slope = F32(SLOPE * math.cos(np.float64(three * x)))
    speed = speed + (F32(force * F32(POWER)) - slope)
    speed = min(max(speed, -fastest), fastest)
    x = min(max(x + speed, left), right)
    if x == left and speed < zero:
        speed = zero
    return x, speed, x >= mark and speed >= goal


@jit
def _park(state: NDArray[Any], generator: NDArray[Any]) -> None:
    state[0], state[1] = uniform(generator, -0.6, -0.4), 0.0
