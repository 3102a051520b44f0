"""MinAtar's Seaquest as a kernel: its rules in its order."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from steadyrl.core.jit import jit
from steadyrl.envs.kernels.minatar.game import (
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
)
from steadyrl.envs.kernels.mt19937 import rand, randint
from steadyrl.envs.kernels.state import NEEDS_RESET, Outcome, Simulation, record_step

OUR_BULLETS, THEIR_BULLETS, FISH, SUBS, DIVERS = range(5)

LISTS = 5

X, Y, TO_RIGHT, MOVE_IN, SHOOT_IN, WIDTH = range(6)

# Capacities: at most one enemy spawns per step and none lives for more than 60; each has one bullet
# at a time, which outlives it by at most 10 steps. The player shoots every fifth step, divers come
# every thirtieth.
BEGIN = (0, 8, 136, 200, 264)

ROWS = 272

ROOM = (8, 128, 64, 64, 8)


@jit
def append(counts: NDArray[Any], rows: NDArray[Any], which: int, part: Any) -> None:
    """Append an entry (x, y, to the right?, moves in, shoots in) to a list unless it is full.

    No game fills a list; a state from a file may.
    """
    if counts[which] >= ROOM[which]:
        return
    at = BEGIN[which] + counts[which]
    rows[at, X], rows[at, Y], rows[at, TO_RIGHT] = part[X], part[Y], part[TO_RIGHT]
    rows[at, MOVE_IN], rows[at, SHOOT_IN] = part[MOVE_IN], part[SHOOT_IN]
    counts[which] += 1


@jit
def remove(counts: NDArray[Any], rows: NDArray[Any], which: int, place: int) -> None:
    """Remove one entry of a list."""
    counts[which] -= 1
    for at in range(BEGIN[which] + place, BEGIN[which] + counts[which]):
        for i in range(WIDTH):
            rows[at, i] = rows[at + 1, i]


@jit
def remove_equal(counts: NDArray[Any], rows: NDArray[Any], which: int, place: int) -> int:
    """Remove the first entry equal to the one at `place`, like list.remove; return its index."""
    first, wanted = BEGIN[which], BEGIN[which] + place
    for at in range(first, wanted):
        same = True
        for i in range(WIDTH):
            same = same and rows[at, i] == rows[wanted, i]
        if same:
            remove(counts, rows, which, at - first)
            return at - first
    remove(counts, rows, which, place)
    return place


@jit
def first_at(counts: NDArray[Any], rows: NDArray[Any], which: int, x: int, y: int) -> int:
    """Return the index of the first entry of a list at (x, y); -1: none."""
    for place in range(counts[which]):
        at = BEGIN[which] + place
        if rows[at, X] == x and rows[at, Y] == y:
            return place
    return -1


# State layout: submarine, divers on board, timers; the lists follow.
(_, SUB_X, SUB_Y, SUB_RIGHT, OXYGEN, ABOARD, SURFACED, MOVE, SPAWN, SPAWN_IN, DIVER_IN, SHOT_IN,
 RAMP, COUNTS) = range(14)  # fmt: skip

MOST_ABOARD, DIVER_INTERVAL, SHOT_INTERVAL = 6, 5, 10


@jit
def _ahead(part: NDArray[Any]) -> bool:
    """Move an entry by one; return whether it is still on the board."""
    part[X] += 1 if part[TO_RIGHT] else -1
    there: bool = 0 <= part[X] <= 9
    return there


@jit
def _meets(state: NDArray[Any], part: NDArray[Any]) -> bool:
    met: bool = part[X] == state[SUB_X] and part[Y] == state[SUB_Y]
    return met


@jit
def move_our_bullets(counts: NDArray[Any], rows: NDArray[Any]) -> int:
    """Move the player's bullets; return how many enemies they hit."""
    hits, i = 0, counts[OUR_BULLETS] - 1
    while 0 <= i < counts[OUR_BULLETS]:
        bullet = rows[BEGIN[OUR_BULLETS] + i]
        gone = not _ahead(bullet)
        for which in (FISH, SUBS):
            target = -1 if gone else first_at(counts, rows, which, bullet[X], bullet[Y])
            if target >= 0:
                remove(counts, rows, which, target)
                hits += 1
                gone = True
        if gone:
            remove_equal(counts, rows, OUR_BULLETS, i)
        i -= 1
    return hits


@jit
def move_divers(state: NDArray[Any], counts: NDArray[Any], rows: NDArray[Any]) -> None:
    """Move the divers and pick up those at the player's position."""
    i = counts[DIVERS] - 1
    while 0 <= i < counts[DIVERS]:
        diver = rows[BEGIN[DIVERS] + i]
        room = state[ABOARD] < MOST_ABOARD
        if room and _meets(state, diver):
            state[ABOARD] += 1
            remove_equal(counts, rows, DIVERS, i)
        elif diver[MOVE_IN] > 0:
            diver[MOVE_IN] -= 1
        else:
            diver[MOVE_IN] = DIVER_INTERVAL
            there = _ahead(diver)
            saved = there and room and _meets(state, diver)
            state[ABOARD] += saved
            if saved or not there:
                remove_equal(counts, rows, DIVERS, i)
        i -= 1


@jit
def move_enemies(
    state: NDArray[Any], counts: NDArray[Any], rows: NDArray[Any], which: int
) -> tuple[int, bool]:
    """Move fish or submarines; return how many bullets hit, and whether one hits the player."""
    hits, struck, i = 0, False, counts[which] - 1
    while 0 <= i < counts[which]:
        at = BEGIN[which] + i
        enemy = rows[at]
        struck = struck or _meets(state, enemy)
        gone = False
        if enemy[MOVE_IN] > 0:
            enemy[MOVE_IN] -= 1
        else:
            enemy[MOVE_IN] = state[MOVE]
            gone = not _ahead(enemy)
            if not gone and _meets(state, enemy):
                struck = True
            elif not gone:
                bullet = first_at(counts, rows, OUR_BULLETS, enemy[X], enemy[Y])
                if bullet >= 0:
                    remove(counts, rows, OUR_BULLETS, bullet)
                    hits += 1
                    gone = True
        x, y, to_right, shoot_in = enemy[X], enemy[Y], enemy[TO_RIGHT], enemy[SHOOT_IN]
        if gone and remove_equal(counts, rows, which, i) < i:
            at, gone = at - 1, False  # an equal entry before it was removed, so this one moved up
        if which == SUBS:
            if shoot_in == 0:
                append(counts, rows, THEIR_BULLETS, (x, y, to_right, 0, 0))
            if not gone:
                rows[at, SHOOT_IN] = SHOT_INTERVAL if shoot_in == 0 else shoot_in - 1
        i -= 1
    return hits, struck


@jit
def move_their_bullets(state: NDArray[Any], counts: NDArray[Any], rows: NDArray[Any]) -> bool:
    """Move the enemies' bullets; return whether one hits the player."""
    struck, i = False, counts[THEIR_BULLETS] - 1
    while 0 <= i < counts[THEIR_BULLETS]:
        bullet = rows[BEGIN[THEIR_BULLETS] + i]
        struck = struck or _meets(state, bullet)
        if not _ahead(bullet):
            remove_equal(counts, rows, THEIR_BULLETS, i)
        else:
            struck = struck or _meets(state, bullet)
        i -= 1
    return struck


ACTIONS = tuple(range(6))

(FRONT, BACK, OUR_BULLET, TRAIL, THEIR_BULLET, FISH_HERE, SUB_HERE, OXYGEN_LEFT, DIVERS_ABOARD,
 DIVER) = range(10)  # fmt: skip

CHANNELS = 10

MAX_OXYGEN, SPAWN_SPEED, DIVER_SPAWN_SPEED, MOVE_SPEED, COOL_DOWN = 200, 20, 30, 5, 5

TABLE = COUNTS + LISTS

DEEPEST = SIZE - 2

RANGES = (
    *(ACTION, SIDE, (0, DEEPEST), YES_NO, (-1, MAX_OXYGEN), (-(2**31), MOST_ABOARD), YES_NO),
    *((2, MOVE_SPEED), (1, SPAWN_SPEED), (0, SPAWN_SPEED)),
    *((0, DIVER_SPAWN_SPEED), (0, COOL_DOWN), (0, 100)),  # the difficulty stops rising long before
    *((0, room) for room in ROOM),
    *((-1, SIZE), (0, DEEPEST), YES_NO, (0, MOVE_SPEED), (0, SHOT_INTERVAL)) * ROWS,
)


def validate(_: NDArray[Any], state: NDArray[Any]) -> None:
    """Raise ValueError for an entry outside the board."""
    rows = state[TABLE:].reshape(ROWS, WIDTH)
    for begin, count in zip(BEGIN, state[COUNTS:TABLE], strict=True):
        there = rows[begin : begin + count, X]
        if ((there < 0) | (there >= SIZE)).any():
            raise ValueError(f"int_state: a list has positions {there.tolist()}, outside the board")
    if state[SUB_X] == (0 if state[SUB_RIGHT] else SIZE - 1):
        raise ValueError(f"int_state: the submarine's end at {state[SUB_X]} is outside the board")


@jit
def step(sim: Simulation, action: NDArray[Any], outcome: Outcome) -> None:
    """Step all N environments."""
    for env in range(len(action)):
        state = sim.int_state[env]
        counts, rows = state[COUNTS:TABLE], state[TABLE:].reshape(ROWS, WIDTH)
        if sim.clock[env, NEEDS_RESET]:
            begin_game(sim, outcome, env)
            _dive(state)
        else:
            twister = sim.generators[env]
            taken = played(sim.int_state, twister, sim.constants, env, action[env])
            _come(state, counts, rows, twister)
            _steer(state, counts, rows, taken)
            by_us = move_our_bullets(counts, rows)
            move_divers(state, counts, rows)
            subs, by_subs = move_enemies(state, counts, rows, SUBS)
            by_bullets = move_their_bullets(state, counts, rows)
            fish, by_fish = move_enemies(state, counts, rows, FISH)
            worth, lost = _breathe(state, sim.constants[RAMPING] > 0)
            lost = lost or by_subs or by_bullets or by_fish
            record_step(sim, outcome, env, by_us + subs + fish + worth, lost)
        _draw(state, counts, rows, outcome.obs[env])


@jit
def _dive(state: NDArray[Any]) -> None:
    clear(state)
    state[OXYGEN], state[SUB_X], state[SURFACED] = MAX_OXYGEN, 5, 1
    state[SPAWN] = state[SPAWN_IN] = SPAWN_SPEED
    state[DIVER_IN], state[MOVE] = DIVER_SPAWN_SPEED, MOVE_SPEED


@jit
def _come(
    state: NDArray[Any], counts: NDArray[Any], rows: NDArray[Any], twister: NDArray[Any]
) -> None:
    """Spawn an enemy and a diver when their timers are at 0."""
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


@jit
def _blocked(counts: NDArray[Any], rows: NDArray[Any], y: int, to_right: bool) -> bool:
    """Return whether an enemy in this board row moves in the other direction."""
    for which in (SUBS, FISH):
        for at in range(BEGIN[which], BEGIN[which] + counts[which]):
            if rows[at, Y] == y and (rows[at, TO_RIGHT] > 0) != to_right:
                return True
    return False


@jit
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


@jit
def _breathe(state: NDArray[Any], ramping: bool) -> tuple[int, bool]:
    """Count the timers down; return the reward of surfacing, and whether the game is lost."""
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


@jit
def _surface(state: NDArray[Any], ramping: bool) -> int:
    """Refill oxygen and release a diver; return the reward for six divers."""
    state[SURFACED] = 1
    reward = 0
    if state[ABOARD] == MOST_ABOARD:
        state[ABOARD] = 0
        reward = state[OXYGEN] * 10 // MAX_OXYGEN
    state[OXYGEN] = MAX_OXYGEN
    state[ABOARD] -= 1  # may become -1, as in the original
    if ramping and (state[SPAWN] > 1 or state[MOVE] > 2):
        if state[MOVE] > 2 and state[RAMP] % 2:
            state[MOVE] -= 1
        if state[SPAWN] > 1:
            state[SPAWN] -= 1
        state[RAMP] += 1
    return reward


@jit
def _draw(
    state: NDArray[Any], counts: NDArray[Any], rows: NDArray[Any], picture: NDArray[Any]
) -> None:
    clear(picture.reshape(-1))
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
