"""How all that is in MinAtar's Seaquest moves, but the submarine: one function for each list."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from envs.kernel_seaquest_lists import (
    BEGIN,
    DIVERS,
    FISH,
    MOVE_IN,
    OUR_BULLETS,
    SHOOT_IN,
    SUBS,
    THEIR_BULLETS,
    TO_RIGHT,
    X,
    Y,
    append,
    first_at,
    remove,
    remove_equal,
)
from memory.compiled import compiled

# The state: the submarine, what is on board, and the timers; the lists follow.
(_, SUB_X, SUB_Y, SUB_RIGHT, OXYGEN, ABOARD, SURFACED, MOVE, SPAWN, SPAWN_IN, DIVER_IN, SHOT_IN,
 RAMP, COUNTS) = range(14)  # fmt: skip
MOST_ABOARD, DIVER_INTERVAL, SHOT_INTERVAL = 6, 5, 10


@compiled
def _ahead(part: NDArray[Any]) -> bool:
    """Move a part by one; tell whether it is still on the board."""
    part[X] += 1 if part[TO_RIGHT] else -1
    there: bool = 0 <= part[X] <= 9
    return there


@compiled
def _meets(state: NDArray[Any], part: NDArray[Any]) -> bool:
    met: bool = part[X] == state[SUB_X] and part[Y] == state[SUB_Y]
    return met


@compiled
def move_our_bullets(counts: NDArray[Any], rows: NDArray[Any]) -> int:
    """Return how many enemies they hit."""
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


@compiled
def move_divers(state: NDArray[Any], counts: NDArray[Any], rows: NDArray[Any]) -> None:
    """Move the divers, and take those aboard that are where we are."""
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


@compiled
def move_enemies(
    state: NDArray[Any], counts: NDArray[Any], rows: NDArray[Any], which: int
) -> tuple[int, bool]:
    """Move fish or submarines; return how many our bullets hit, and whether one hits us."""
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
            at, gone = at - 1, False  # another one that was equal went; this one moved up
        if which == SUBS:
            if shoot_in == 0:
                append(counts, rows, THEIR_BULLETS, (x, y, to_right, 0, 0))
            if not gone:
                rows[at, SHOOT_IN] = SHOT_INTERVAL if shoot_in == 0 else shoot_in - 1
        i -= 1
    return hits, struck


@compiled
def move_their_bullets(state: NDArray[Any], counts: NDArray[Any], rows: NDArray[Any]) -> bool:
    """Tell whether one hits us."""
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
