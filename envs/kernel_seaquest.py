"""MinAtar's Seaquest as a kernel: its rules in its order."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from envs.kernel_mersenne import rand, randint
from envs.kernel_minatar import (
    ACTION,
    DOWN,
    FIRE,
    LEFT,
    LIT,
    RAMPING,
    RIGHT,
    SIDE,
    SIZE,
    UP,
    YES_NO,
    begin_game,
    clear,
    played,
    wipe,
)
from envs.kernel_seaquest_lists import (
    BEGIN,
    DIVERS,
    FISH,
    LISTS,
    OUR_BULLETS,
    ROOM,
    ROWS,
    SUBS,
    THEIR_BULLETS,
    TO_RIGHT,
    WIDTH,
    X,
    Y,
    append,
)
from envs.kernel_seaquest_moves import (
    ABOARD,
    COUNTS,
    DIVER_IN,
    DIVER_INTERVAL,
    MOST_ABOARD,
    MOVE,
    OXYGEN,
    RAMP,
    SHOT_IN,
    SHOT_INTERVAL,
    SPAWN,
    SPAWN_IN,
    SUB_RIGHT,
    SUB_X,
    SUB_Y,
    SURFACED,
    move_divers,
    move_enemies,
    move_our_bullets,
    move_their_bullets,
)
from envs.kernel_steps import OVER, Outcome, Simulation, finish
from memory.compiled import compiled

ACTIONS = tuple(range(6))
(FRONT, BACK, OUR_BULLET, TRAIL, THEIR_BULLET, FISH_HERE, SUB_HERE, OXYGEN_LEFT, DIVERS_ABOARD,
 DIVER) = range(10)  # fmt: skip
CHANNELS = 10
MAX_OXYGEN, SPAWN_SPEED, DIVER_SPAWN_SPEED, MOVE_SPEED, COOL_DOWN = 200, 20, 30, 5, 5
TABLE = COUNTS + LISTS
WHOLES = TABLE + ROWS * WIDTH
DEEPEST = SIZE - 2
RANGES = (
    *(ACTION, SIDE, (0, DEEPEST), YES_NO, (-1, MAX_OXYGEN), (-(2**31), MOST_ABOARD), YES_NO),
    *((2, MOVE_SPEED), (1, SPAWN_SPEED), (0, SPAWN_SPEED)),
    *((0, DIVER_SPAWN_SPEED), (0, COOL_DOWN), (0, 100)),  # it gets no harder long before
    *((0, room) for room in ROOM),
    *((-1, SIZE), (0, DEEPEST), YES_NO, (0, MOVE_SPEED), (0, SHOT_INTERVAL)) * ROWS,
)


def validate(_: NDArray[Any], state: NDArray[Any]) -> None:
    """Refuse what is said to be there and is beside the board."""
    rows = state[TABLE:].reshape(ROWS, WIDTH)
    for begin, count in zip(BEGIN, state[COUNTS:TABLE], strict=True):
        there = rows[begin : begin + count, X]
        if ((there < 0) | (there >= SIZE)).any():
            raise ValueError(f"wholes: a list has places {there.tolist()}, some beside the board")
    if state[SUB_X] == (0 if state[SUB_RIGHT] else SIZE - 1):
        raise ValueError(f"wholes: the submarine's end at {state[SUB_X]} is beside the board")


@compiled
def step(sim: Simulation, action: NDArray[Any], row: Outcome) -> None:
    """Make one row [N]."""
    for env in range(len(action)):
        state = sim.wholes[env]
        counts, rows = state[COUNTS:TABLE], state[TABLE:].reshape(ROWS, WIDTH)
        if sim.clock[env, OVER]:
            begin_game(sim, row, env)
            _dive(state)
        else:
            twister = sim.generators[env]
            taken = played(sim.wholes, twister, sim.constants, env, action[env])
            _come(state, counts, rows, twister)
            _steer(state, counts, rows, taken)
            by_us = move_our_bullets(counts, rows)
            move_divers(state, counts, rows)
            subs, by_subs = move_enemies(state, counts, rows, SUBS)
            by_bullets = move_their_bullets(state, counts, rows)
            fish, by_fish = move_enemies(state, counts, rows, FISH)
            worth, lost = _breathe(state, sim.constants[RAMPING] > 0)
            lost = lost or by_subs or by_bullets or by_fish
            finish(sim, row, env, by_us + subs + fish + worth, lost)
        _draw(state, counts, rows, row.obs[env])


@compiled
def _dive(state: NDArray[Any]) -> None:
    clear(state)
    state[OXYGEN], state[SUB_X], state[SURFACED] = MAX_OXYGEN, 5, 1
    state[SPAWN] = state[SPAWN_IN] = SPAWN_SPEED
    state[DIVER_IN], state[MOVE] = DIVER_SPAWN_SPEED, MOVE_SPEED


@compiled
def _come(
    state: NDArray[Any], counts: NDArray[Any], rows: NDArray[Any], twister: NDArray[Any]
) -> None:
    """Let an enemy and a diver come where it is time for them."""
    if state[SPAWN_IN] == 0:
        to_right, is_sub = rand(twister) < 1 / 2, rand(twister) < 1 / 3
        y = randint(twister, 1, 9)
        if not _blocked(counts, rows, y, to_right):
            part = (0 if to_right else 9, y, to_right, state[MOVE], SHOT_INTERVAL if is_sub else 0)
            append(counts, rows, SUBS if is_sub else FISH, part)
        state[SPAWN_IN] = state[SPAWN]
    if state[DIVER_IN] == 0:
        to_right = rand(twister) < 1 / 2
        y = randint(twister, 1, 9)
        append(counts, rows, DIVERS, (0 if to_right else 9, y, to_right, DIVER_INTERVAL, 0))
        state[DIVER_IN] = DIVER_SPAWN_SPEED


@compiled
def _blocked(counts: NDArray[Any], rows: NDArray[Any], y: int, to_right: bool) -> bool:
    """Tell whether an enemy in this row goes the other way."""
    for which in (SUBS, FISH):
        for at in range(BEGIN[which], BEGIN[which] + counts[which]):
            if rows[at, Y] == y and (rows[at, TO_RIGHT] > 0) != to_right:
                return True
    return False


@compiled
def _steer(state: NDArray[Any], counts: NDArray[Any], rows: NDArray[Any], action: int) -> None:
    if action == FIRE and state[SHOT_IN] == 0:
        append(counts, rows, OUR_BULLETS, (state[SUB_X], state[SUB_Y], state[SUB_RIGHT], 0, 0))
        state[SHOT_IN] = COOL_DOWN
    elif action == LEFT:
        state[SUB_X], state[SUB_RIGHT] = max(0, state[SUB_X] - 1), 0
    elif action == RIGHT:
        state[SUB_X], state[SUB_RIGHT] = min(9, state[SUB_X] + 1), 1
    elif action == UP:
        state[SUB_Y] = max(0, state[SUB_Y] - 1)
    elif action == DOWN:
        state[SUB_Y] = min(8, state[SUB_Y] + 1)


@compiled
def _breathe(state: NDArray[Any], ramping: bool) -> tuple[int, bool]:
    """Count the timers down; return what surfacing is worth, and whether the game is lost."""
    for timer in (SPAWN_IN, DIVER_IN, SHOT_IN):
        if state[timer] > 0:
            state[timer] -= 1
    lost = state[OXYGEN] <= 0
    if state[SUB_Y] > 0:
        state[OXYGEN] -= 1
        state[SURFACED] = 0
    elif not state[SURFACED]:
        if state[ABOARD] != 0:
            return _surface(state, ramping), lost
        lost = True
    return 0, lost


@compiled
def _surface(state: NDArray[Any], ramping: bool) -> int:
    """Breathe, set divers down, and return what six of them are worth."""
    state[SURFACED] = 1
    reward = 0
    if state[ABOARD] == MOST_ABOARD:
        state[ABOARD] = 0
        reward = state[OXYGEN] * 10 // MAX_OXYGEN
    state[OXYGEN] = MAX_OXYGEN
    state[ABOARD] -= 1  # below none, too, as in the original
    if ramping and (state[SPAWN] > 1 or state[MOVE] > 2):
        if state[MOVE] > 2 and state[RAMP] % 2:
            state[MOVE] -= 1
        if state[SPAWN] > 1:
            state[SPAWN] -= 1
        state[RAMP] += 1
    return reward


@compiled
def _draw(
    state: NDArray[Any], counts: NDArray[Any], rows: NDArray[Any], picture: NDArray[Any]
) -> None:
    wipe(picture)
    picture[FRONT, state[SUB_Y], state[SUB_X]] = LIT
    picture[BACK, state[SUB_Y], state[SUB_X] + (-1 if state[SUB_RIGHT] else 1)] = LIT
    for x in range(max(0, state[OXYGEN]) * 10 // MAX_OXYGEN):
        picture[OXYGEN_LEFT, 9, x] = LIT
    for x in range(9 - state[ABOARD], 9):
        picture[DIVERS_ABOARD, 9, x] = LIT
    shown = (OUR_BULLET, THEIR_BULLET, FISH_HERE, SUB_HERE, DIVER)
    for which in range(LISTS):
        for at in range(BEGIN[which], BEGIN[which] + counts[which]):
            part = rows[at]
            picture[shown[which], part[Y], part[X]] = LIT
            behind = part[X] + (-1 if part[TO_RIGHT] else 1)
            if which not in (OUR_BULLETS, THEIR_BULLETS) and 0 <= behind <= 9:
                picture[TRAIL, part[Y], behind] = LIT
