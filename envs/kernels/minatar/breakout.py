"""MinAtar's Breakout as a kernel: its rules in its order."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from steadyrl.core.jit import jit
from steadyrl.envs.kernels.minatar.game import (
    ACTION,
    LEFT,
    LIT,
    NOTHING,
    RIGHT,
    SIDE,
    SIZE,
    YES_NO,
    begin_game,
    clear,
    played,
)
from steadyrl.envs.kernels.mt19937 import randint
from steadyrl.envs.kernels.state import NEEDS_RESET, Outcome, Simulation, record_step

ACTIONS = (NOTHING, LEFT, RIGHT)
PADDLE, BALL, TRAIL, BRICK = range(4)
CHANNELS = 4
# State layout; directions 0 … 3: up left, up right, down right, down left.
_, X, Y, DIRECTION, PLACE, STRUCK, LAST_X, LAST_Y, BRICKS = range(9)
WHOLES = BRICKS + SIZE * SIZE
RANGES = (ACTION, SIDE, SIDE, (0, 3), SIDE, YES_NO, SIDE, SIDE) + (YES_NO,) * (SIZE * SIZE)
TOP, BOTTOM = 1, 4  # board rows with bricks
MOVE_X, MOVE_Y = (-1, 1, 1, -1), (-1, -1, 1, 1)


@jit
def step(sim: Simulation, action: NDArray[Any], outcome: Outcome) -> None:
    """Step all N environments."""
    for env in range(len(action)):
        state, twister = sim.int_state[env], sim.generators[env]
        if sim.clock[env, NEEDS_RESET]:
            begin_game(sim, outcome, env)
            _serve(state, randint(twister, 0, 2))
        else:
            taken = played(sim.int_state, twister, sim.constants, env, action[env])
            if taken == LEFT:
                state[PLACE] = max(0, state[PLACE] - 1)
            elif taken == RIGHT:
                state[PLACE] = min(9, state[PLACE] + 1)
            reward, lost = _fly(state)
            record_step(sim, outcome, env, reward, lost)
        _draw(state, outcome.obs[env])


@jit
def _serve(state: NDArray[Any], side: int) -> None:
    state[X], state[DIRECTION] = (9, 3) if side else (0, 2)
    state[Y], state[PLACE], state[STRUCK] = 3, 4, 0
    state[LAST_X], state[LAST_Y] = state[X], state[Y]
    clear(state[BRICKS:])
    _build(state)


@jit
def _build(state: NDArray[Any]) -> None:
    for brick in range(BRICKS + SIZE * TOP, BRICKS + SIZE * BOTTOM):
        state[brick] = 1


@jit
def _is_clear(state: NDArray[Any]) -> bool:
    for brick in range(BRICKS, WHOLES):  # noqa: SIM110 - a loop is what compiles to one
        if state[brick]:
            return False
    return True


@jit
def _fly(state: NDArray[Any]) -> tuple[int, bool]:
    """Move the ball; return the reward, and whether the ball is lost."""
    state[LAST_X], state[LAST_Y] = state[X], state[Y]
    x, y = state[X] + MOVE_X[state[DIRECTION]], state[Y] + MOVE_Y[state[DIRECTION]]
    if x < 0 or x > 9:
        x = min(max(x, 0), 9)
        state[DIRECTION] ^= 1
    reward, lost, on_brick = 0, False, False
    if y < 0:
        y = 0
        state[DIRECTION] = 3 - state[DIRECTION]
    elif state[BRICKS + SIZE * y + x]:
        on_brick = True
        if not state[STRUCK]:
            reward = 1
            state[STRUCK], state[BRICKS + SIZE * y + x] = 1, 0
            y, state[DIRECTION] = state[LAST_Y], 3 - state[DIRECTION]
    elif y == 9:
        if _is_clear(state):
            _build(state)
        if state[X] == state[PLACE]:
            y, state[DIRECTION] = state[LAST_Y], 3 - state[DIRECTION]
        elif x == state[PLACE]:
            y, state[DIRECTION] = state[LAST_Y], state[DIRECTION] ^ 2
        else:
            lost = True
    if not on_brick:
        state[STRUCK] = 0
    state[X], state[Y] = x, y
    return reward, lost


@jit
def _draw(state: NDArray[Any], picture: NDArray[Any]) -> None:
    clear(picture.reshape(-1))
    picture[BALL, state[Y], state[X]] = LIT
    picture[PADDLE, 9, state[PLACE]] = LIT
    picture[TRAIL, state[LAST_Y], state[LAST_X]] = LIT
    for y in range(SIZE):
        for x in range(SIZE):
            picture[BRICK, y, x] = LIT * state[BRICKS + SIZE * y + x]
