"""MinAtar's Asterix as a kernel: its rules in its order."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from steadyrl.core.jit import jit
from steadyrl.envs.kernels.minatar.game import (
    ACTION,
    DOWN,
    LEFT,
    LIT,
    NOTHING,
    RAMPING,
    RIGHT,
    SIDE,
    SIZE,
    UP,
    YES_NO,
    begin_game,
    clear,
    played,
)
from steadyrl.envs.kernels.mt19937 import rand, randint
from steadyrl.envs.kernels.state import NEEDS_RESET, Outcome, Simulation, record_step

ACTIONS = (NOTHING, LEFT, UP, RIGHT, DOWN)
PLAYER, ENEMY, TRAIL, GOLD = range(4)
CHANNELS = 4
RAMP_INTERVAL, SPAWN_SPEED, MOVE_SPEED = 100, 10, 5
SLOTS = 8  # one per board row, except the first and the last
# State layout; at its end per slot: occupied, position, moves right, is gold.
_, X, Y, SPAWN, SPAWN_IN, MOVE, MOVE_IN, RAMP_IN, RAMP, FIRST = range(10)
THERE, PLACE, TO_RIGHT, IS_GOLD, WIDTH = range(5)
RANGES = (
    *(ACTION, SIDE, (1, SLOTS)),
    *((1, SPAWN_SPEED), (0, SPAWN_SPEED), (1, MOVE_SPEED), (0, MOVE_SPEED)),
    *((-1, RAMP_INTERVAL), (0, 100)),  # the difficulty stops rising long before
    *(YES_NO, (-1, SIZE), YES_NO, YES_NO) * SLOTS,
)


def validate(_: NDArray[Any], state: NDArray[Any]) -> None:
    """Raise ValueError for an entity outside the board."""
    for slot in range(SLOTS):
        entity = state[FIRST + WIDTH * slot : FIRST + WIDTH * (slot + 1)]
        if entity[THERE] and not 0 <= entity[PLACE] < SIZE:
            raise ValueError(f"int_state: an entity of board row {slot + 1} is at {entity[PLACE]}")


@jit
def step(sim: Simulation, action: NDArray[Any], outcome: Outcome) -> None:
    """Step all N environments."""
    for env in range(len(action)):
        state, twister = sim.int_state[env], sim.generators[env]
        if sim.clock[env, NEEDS_RESET]:
            begin_game(sim, outcome, env)
            _start(state)
        else:
            taken = played(sim.int_state, twister, sim.constants, env, action[env])
            reward, caught = _play(state, taken, twister)
            if sim.constants[RAMPING] > 0:
                _ramp(state)
            record_step(sim, outcome, env, reward, caught)
        _draw(state, outcome.obs[env])


@jit
def _start(state: NDArray[Any]) -> None:
    clear(state)
    state[X] = state[Y] = 5
    state[SPAWN] = state[SPAWN_IN] = SPAWN_SPEED
    state[MOVE] = state[MOVE_IN] = MOVE_SPEED
    state[RAMP_IN] = RAMP_INTERVAL


@jit
def _play(state: NDArray[Any], action: int, twister: NDArray[Any]) -> tuple[int, bool]:
    """Move player and entities; return the reward, and whether an enemy hit the player."""
    if state[SPAWN_IN] == 0:
        _spawn(state, twister)
        state[SPAWN_IN] = state[SPAWN]
    if action == LEFT:
        state[X] = max(0, state[X] - 1)
    elif action == RIGHT:
        state[X] = min(9, state[X] + 1)
    elif action == UP:
        state[Y] = max(1, state[Y] - 1)
    elif action == DOWN:
        state[Y] = min(8, state[Y] + 1)
    reward, caught = _meet(state)
    if state[MOVE_IN] == 0:
        state[MOVE_IN] = state[MOVE]
        for slot in range(SLOTS):
            entity = state[FIRST + WIDTH * slot : FIRST + WIDTH * (slot + 1)]
            if entity[THERE]:
                entity[PLACE] += 1 if entity[TO_RIGHT] else -1
                if entity[PLACE] < 0 or entity[PLACE] > 9:
                    entity[THERE] = 0
        more, again = _meet(state)
        reward, caught = reward + more, caught or again
    state[SPAWN_IN] -= 1
    state[MOVE_IN] -= 1
    return reward, caught


@jit
def _meet(state: NDArray[Any]) -> tuple[int, bool]:
    """Return the reward at the player's position, and whether an enemy is there."""
    entity = state[FIRST + WIDTH * (state[Y] - 1) : FIRST + WIDTH * state[Y]]
    if not entity[THERE] or entity[PLACE] != state[X]:
        return 0, False
    if not entity[IS_GOLD]:
        return 0, True
    entity[THERE] = 0
    return 1, False


@jit
def _spawn(state: NDArray[Any], twister: NDArray[Any]) -> None:
    to_right, is_gold = rand(twister) < 1 / 2, rand(twister) < 1 / 3
    free = np.empty(SLOTS, np.int64)
    count = 0
    for slot in range(SLOTS):
        if not state[FIRST + WIDTH * slot + THERE]:
            free[count] = slot
            count += 1
    if count:
        at = FIRST + WIDTH * free[randint(twister, 0, count)]
        state[at + THERE], state[at + PLACE] = 1, 0 if to_right else 9
        state[at + TO_RIGHT], state[at + IS_GOLD] = to_right, is_gold


@jit
def _ramp(state: NDArray[Any]) -> None:
    """Increase the difficulty after each interval."""
    if state[SPAWN] <= 1 and state[MOVE] <= 1:
        return
    if state[RAMP_IN] >= 0:
        state[RAMP_IN] -= 1
        return
    if state[MOVE] > 1 and state[RAMP] % 2:
        state[MOVE] -= 1
    if state[SPAWN] > 1:
        state[SPAWN] -= 1
    state[RAMP] += 1
    state[RAMP_IN] = RAMP_INTERVAL


@jit
def _draw(state: NDArray[Any], picture: NDArray[Any]) -> None:
    clear(picture.reshape(-1))
    picture[PLAYER, state[Y], state[X]] = LIT
    for slot in range(SLOTS):
        entity = state[FIRST + WIDTH * slot : FIRST + WIDTH * (slot + 1)]
        if entity[THERE]:
            x, behind = entity[PLACE], entity[PLACE] + (-1 if entity[TO_RIGHT] else 1)
            picture[GOLD if entity[IS_GOLD] else ENEMY, slot + 1, x] = LIT
            if 0 <= behind <= 9:
                picture[TRAIL, slot + 1, behind] = LIT
