"""MinAtar's Space Invaders as a kernel: its rules in its order."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from steadyrl.core.jit import jit
from steadyrl.envs.kernels.minatar.game import (
    ACTION,
    FIRE,
    LEFT,
    LIT,
    NOTHING,
    RAMPING,
    RIGHT,
    SIDE,
    SIZE,
    YES_NO,
    begin_game,
    clear,
    played,
)
from steadyrl.envs.kernels.state import NEEDS_RESET, Outcome, Simulation, record_step

ACTIONS = (NOTHING, LEFT, RIGHT, FIRE)
CANNON, ALIEN, ALIEN_LEFT, ALIEN_RIGHT, OUR_BULLET, THEIR_BULLET = range(6)
CHANNELS = 6
SHOT_INTERVAL, MOVE_INTERVAL, ENEMY_SHOT_INTERVAL, FASTEST = 5, 12, 10, 6
# State layout; at its end three boards: aliens, the player's bullets, the aliens' bullets.
_, X, DIRECTION, MOVE, MOVE_IN, ENEMY_SHOT_IN, SHOT_IN, FIRST = range(8)
ALIENS, OURS, THEIRS = range(3)
RANGES = (
    *(ACTION, SIDE, (-1, 1), (FASTEST, MOVE_INTERVAL), (-1, MOVE_INTERVAL)),
    *((-1, ENEMY_SHOT_INTERVAL), (0, SHOT_INTERVAL)),
    *(YES_NO,) * (3 * SIZE * SIZE),
)


@jit
def step(sim: Simulation, action: NDArray[Any], outcome: Outcome) -> None:
    """Step all N environments."""
    for env in range(len(action)):
        state = sim.int_state[env]
        boards = state[FIRST:].reshape(3, SIZE, SIZE)
        if sim.clock[env, NEEDS_RESET]:
            begin_game(sim, outcome, env)
            clear(state)
            state[X], state[DIRECTION], state[MOVE] = 5, -1, MOVE_INTERVAL
            state[MOVE_IN], state[ENEMY_SHOT_IN] = MOVE_INTERVAL, ENEMY_SHOT_INTERVAL
            _line_up(boards)
        else:
            taken = played(sim.int_state, sim.generators[env], sim.constants, env, action[env])
            _steer(state, boards, taken)
            _fly(boards)
            hit = _is_hit(state, boards)
            if state[MOVE_IN] == 0:
                hit = _march(state, boards) or hit
            if state[ENEMY_SHOT_IN] == 0:
                _shoot(state, boards)
            state[MOVE_IN] -= 1
            state[ENEMY_SHOT_IN] -= 1
            shot = _collide(boards)
            if _count(boards, 0, SIZE, 0, SIZE) == 0:
                if state[MOVE] > FASTEST and sim.constants[RAMPING] > 0:
                    state[MOVE] -= 1
                _line_up(boards)
            record_step(sim, outcome, env, shot, hit)
        _draw(state, boards, outcome.obs[env])


@jit
def _line_up(boards: NDArray[Any]) -> None:
    for y in range(4):
        for x in range(2, 8):
            boards[ALIENS, y, x] = 1


@jit
def _count(boards: NDArray[Any], top: int, bottom: int, left: int, right: int) -> int:
    """Count the aliens in a part of the board."""
    count = 0
    for y in range(top, bottom):
        for x in range(left, right):
            count += boards[ALIENS, y, x]
    return count


@jit
def _steer(state: NDArray[Any], boards: NDArray[Any], action: int) -> None:
    if action == FIRE and state[SHOT_IN] == 0:
        boards[OURS, 9, state[X]] = 1
        state[SHOT_IN] = SHOT_INTERVAL
    elif action == LEFT:
        state[X] = max(0, state[X] - 1)
    elif action == RIGHT:
        state[X] = min(9, state[X] + 1)
    if state[SHOT_IN] > 0:
        state[SHOT_IN] -= 1


@jit
def _fly(boards: NDArray[Any]) -> None:
    """Move all bullets, the player's up and the aliens' down."""
    for x in range(SIZE):
        for y in range(SIZE - 1):
            boards[OURS, y, x] = boards[OURS, y + 1, x]
            boards[THEIRS, SIZE - 1 - y, x] = boards[THEIRS, SIZE - 2 - y, x]
        boards[OURS, SIZE - 1, x] = boards[THEIRS, 0, x] = 0


@jit
def _is_hit(state: NDArray[Any], boards: NDArray[Any]) -> bool:
    hit: bool = boards[THEIRS, 9, state[X]] + boards[ALIENS, 9, state[X]] > 0
    return hit


@jit
def _march(state: NDArray[Any], boards: NDArray[Any]) -> bool:
    """Move the aliens sideways, or down at a side; return whether they reach ground or cannon."""
    state[MOVE_IN] = min(_count(boards, 0, SIZE, 0, SIZE), state[MOVE])
    aside, down, landed = state[DIRECTION], 0, False
    side = 0 if aside < 0 else SIZE - 1
    if _count(boards, 0, SIZE, side, side + 1) > 0:
        landed = _count(boards, SIZE - 1, SIZE, 0, SIZE) > 0
        state[DIRECTION] = -aside
        aside, down = 0, 1
    before = boards[ALIENS].copy()
    for y in range(SIZE):
        for x in range(SIZE):
            boards[ALIENS, (y + down) % SIZE, (x + aside) % SIZE] = before[y, x]
    landed = landed or boards[ALIENS, 9, state[X]] > 0
    return landed


@jit
def _shoot(state: NDArray[Any], boards: NDArray[Any]) -> None:
    """Let the lowest alien of the nearest column shoot (ties: the left column)."""
    x, state[ENEMY_SHOT_IN] = state[X], ENEMY_SHOT_INTERVAL
    for distance in range(SIZE):
        for column in (x - distance, x + distance):
            if 0 <= column < SIZE:
                for y in range(SIZE - 1, -1, -1):
                    if boards[ALIENS, y, column]:
                        boards[THEIRS, y, column] = 1
                        return


@jit
def _collide(boards: NDArray[Any]) -> int:
    """Remove aliens that bullets hit, and these bullets; return how many."""
    shot = 0
    for y in range(SIZE):
        for x in range(SIZE):
            if boards[ALIENS, y, x] and boards[OURS, y, x]:
                boards[ALIENS, y, x] = boards[OURS, y, x] = 0
                shot += 1
    return shot


@jit
def _draw(state: NDArray[Any], boards: NDArray[Any], picture: NDArray[Any]) -> None:
    clear(picture.reshape(-1))
    picture[CANNON, 9, state[X]] = LIT
    side = ALIEN_LEFT if state[DIRECTION] < 0 else ALIEN_RIGHT
    for y in range(SIZE):
        for x in range(SIZE):
            picture[ALIEN, y, x] = picture[side, y, x] = LIT * boards[ALIENS, y, x]
            picture[OUR_BULLET, y, x] = LIT * boards[OURS, y, x]
            picture[THEIR_BULLET, y, x] = LIT * boards[THEIRS, y, x]
