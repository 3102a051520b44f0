"""CartPole as a kernel: Gymnasium's equations in Gymnasium's order."""

from __future__ import annotations

import math
from typing import Any

from gymnasium import spaces
from numpy.typing import NDArray

from steadyrl.core.jit import jit
from steadyrl.envs.kernels.kernel import Kernel
from steadyrl.envs.kernels.pcg64 import uniform
from steadyrl.envs.kernels.state import NEEDS_RESET, Outcome, Simulation, begin_episode, record_step

GRAVITY, CART, POLE, FORCE, SECONDS = 9.8, 1.0, 0.1, 10.0, 0.02
LENGTH = 0.5  # half the pole's length
TOTAL = POLE + CART
POLE_LENGTH = POLE * LENGTH
FARTHEST, STEEPEST = 2.4, 12 * 2 * math.pi / 360
# An episode's last state lies beyond the limits; speeds stay far below this bound.
FARTHER, STEEPER, FASTEST = FARTHEST + 1, STEEPEST + 1, 100.0
RANGES = (
    *((-FARTHER, FARTHER), (-FASTEST, FASTEST)),
    *((-STEEPER, STEEPER), (-FASTEST, FASTEST)),
)
STANDING, FALLING = 0, 1  # constants: reward of a step, and of the last step


def cartpole(sutton_barto_reward: bool = False) -> Kernel:
    """Return the kernel of CartPole."""
    rewards = (0.0, -1.0) if sutton_barto_reward else (1.0, 1.0)
    return Kernel(step, (4,), spaces.Discrete(2), float_state=RANGES, constants=rewards)


@jit
def step(sim: Simulation, action: NDArray[Any], outcome: Outcome) -> None:
    """Step all N environments."""
    states, obs = sim.float_state, outcome.obs
    for env in range(len(action)):
        if sim.clock[env, NEEDS_RESET]:
            begin_episode(sim, outcome, env)
            for i in range(4):
                states[env, i] = uniform(sim.generators[env], -0.05, 0.05)
        else:
            fell = _push(states, env, FORCE if action[env] == 1 else -FORCE)
            record_step(sim, outcome, env, sim.constants[FALLING if fell else STANDING], fell)
        for i in range(4):
            obs[env, i] = states[env, i]


@jit
def _push(states: NDArray[Any], env: int, force: float) -> bool:
    x, x_dot, theta, theta_dot = states[env, 0], states[env, 1], states[env, 2], states[env, 3]
    cos, sin = math.cos(theta), math.sin(theta)
    temp = (force + POLE_LENGTH * (theta_dot * theta_dot) * sin) / TOTAL
    theta_acc = (GRAVITY * sin - cos * temp) / (LENGTH * (4.0 / 3.0 - POLE * (cos * cos) / TOTAL))
    x_acc = temp - POLE_LENGTH * theta_acc * cos / TOTAL
    x, x_dot = x + SECONDS * x_dot, x_dot + SECONDS * x_acc
    theta, theta_dot = theta + SECONDS * theta_dot, theta_dot + SECONDS * theta_acc
    states[env, 0], states[env, 1], states[env, 2], states[env, 3] = x, x_dot, theta, theta_dot
    fell: bool = x < -FARTHEST or x > FARTHEST or theta < -STEEPEST or theta > STEEPEST
    return fell
