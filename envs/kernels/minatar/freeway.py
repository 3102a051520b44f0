"""MinAtar's Freeway as a kernel: its rules in its order."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from steadyrl.core.jit import jit
from steadyrl.envs.kernels.minatar.game import (
    ACTION,
    DOWN,
    LIT,
    NOTHING,
    SIDE,
    UP,
    begin_game,
    clear,
    played,
)
from steadyrl.envs.kernels.mt19937 import rand, randint
from steadyrl.envs.kernels.state import NEEDS_RESET, Outcome, Simulation, record_step

ACTIONS = (NOTHING, UP, DOWN)
CHICKEN, CAR, SLOWEST = range(3)  # followed by one channel per speed: the car's trail
CHANNELS = 7
PLAYER_SPEED, TIME_LIMIT, COLUMN = 3, 2500, 4
FASTEST = 5  # steps between two moves of the slowest car
CARS = 8  # one per board row, except the first and the last
# State layout; at its end per car: position, steps until it moves, signed speed.
_, Y, MOVE_IN, TIME, FIRST = range(5)
PLACE, WAIT, SPEED, WIDTH = range(4)
RANGES = (
    *(ACTION, SIDE, (0, PLAYER_SPEED), (-1, TIME_LIMIT)),
    *(SIDE, (0, FASTEST), (-FASTEST, FASTEST)) * CARS,
)


@jit
def step(sim: Simulation, action: NDArray[Any], outcome: Outcome) -> None:
    """Step all N environments."""
    for env in range(len(action)):
        state, twister = sim.int_state[env], sim.generators[env]
        if sim.clock[env, NEEDS_RESET]:
            begin_game(sim, outcome, env)
            clear(state[FIRST:])
            _shuffle(state, twister)
            state[Y], state[MOVE_IN], state[TIME] = 9, PLAYER_SPEED, TIME_LIMIT
        else:
            taken = played(sim.int_state, twister, sim.constants, env, action[env])
            reward = _play(state, taken, twister)
            record_step(sim, outcome, env, reward, state[TIME] < 0)
        _draw(state, outcome.obs[env])


@jit
def _shuffle(state: NDArray[Any], twister: NDArray[Any]) -> None:
    """Draw the speeds of all cars, then their directions."""
    for car in range(CARS):
        state[FIRST + WIDTH * car + WAIT] = randint(twister, 1, 6)
    for car in range(CARS):
        at = FIRST + WIDTH * car
        state[at + SPEED] = state[at + WAIT] * np.int64(np.sign(rand(twister) - 0.5))
        state[at + WAIT] = abs(state[at + SPEED])


@jit
def _play(state: NDArray[Any], action: int, twister: NDArray[Any]) -> int:
    """Move chicken and cars; return the reward."""
    reward = 0
    if state[MOVE_IN] == 0 and action in (UP, DOWN):
        state[MOVE_IN] = PLAYER_SPEED
        state[Y] = max(0, state[Y] - 1) if action == UP else min(9, state[Y] + 1)
    if state[Y] == 0:
        reward = 1
        _shuffle(state, twister)
        state[Y] = 9
    for number in range(CARS):
        car = state[FIRST + WIDTH * number : FIRST + WIDTH * (number + 1)]
        if car[PLACE] == COLUMN and number + 1 == state[Y]:
            state[Y] = 9
        if car[WAIT] > 0:
            car[WAIT] -= 1
            continue
        car[WAIT] = abs(car[SPEED])
        car[PLACE] = (car[PLACE] + (1 if car[SPEED] > 0 else -1)) % 10
        if car[PLACE] == COLUMN and number + 1 == state[Y]:
            state[Y] = 9
    if state[MOVE_IN] > 0:
        state[MOVE_IN] -= 1
    state[TIME] -= 1
    return reward


@jit
def _draw(state: NDArray[Any], picture: NDArray[Any]) -> None:
    clear(picture.reshape(-1))
    picture[CHICKEN, state[Y], COLUMN] = LIT
    for number in range(CARS):
        car = state[FIRST + WIDTH * number : FIRST + WIDTH * (number + 1)]
        picture[CAR, number + 1, car[PLACE]] = LIT
        behind = (car[PLACE] + (-1 if car[SPEED] > 0 else 1)) % 10
        picture[SLOWEST + abs(car[SPEED]) - 1, number + 1, behind] = LIT
