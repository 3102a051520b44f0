"""The lists of MinAtar's Seaquest in arrays: what it goes through, and removes parts of, in order.

A list is some rows of a table [M, 5], of which the first so many count. Like Python's, a list is
gone through from behind while parts are removed, and what is removed is the first that is equal.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from memory.compiled import compiled

OUR_BULLETS, THEIR_BULLETS, FISH, SUBS, DIVERS = range(5)
LISTS = 5
X, Y, TO_RIGHT, MOVE_IN, SHOOT_IN, WIDTH = range(6)
# At most one enemy comes in a row and none stays for more than 60; each has one bullet at a time,
# which outlives it by 10 rows at most. We shoot every fifth row, divers come every thirtieth.
BEGIN = (0, 8, 136, 200, 264)
ROWS = 272
ROOM = (8, 128, 64, 64, 8)


@compiled
def append(counts: NDArray[Any], rows: NDArray[Any], which: int, part: Any) -> None:
    """Put a part (x, y, to the right?, moves in, shoots in) at the end of a list, if not full.

    No game fills one; a state out of a file may.
    """
    if counts[which] >= ROOM[which]:
        return
    at = BEGIN[which] + counts[which]
    rows[at, X], rows[at, Y], rows[at, TO_RIGHT] = part[X], part[Y], part[TO_RIGHT]
    rows[at, MOVE_IN], rows[at, SHOOT_IN] = part[MOVE_IN], part[SHOOT_IN]
    counts[which] += 1


@compiled
def remove(counts: NDArray[Any], rows: NDArray[Any], which: int, place: int) -> None:
    """Remove one part of a list."""
    counts[which] -= 1
    for at in range(BEGIN[which] + place, BEGIN[which] + counts[which]):
        for i in range(WIDTH):
            rows[at, i] = rows[at + 1, i]


@compiled
def remove_equal(counts: NDArray[Any], rows: NDArray[Any], which: int, place: int) -> int:
    """Remove the first part of a list that equals the one at this place; return where it was."""
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


@compiled
def first_at(counts: NDArray[Any], rows: NDArray[Any], which: int, x: int, y: int) -> int:
    """Return the place of the first part of a list that is here, -1 where none is."""
    for place in range(counts[which]):
        at = BEGIN[which] + place
        if rows[at, X] == x and rows[at, Y] == y:
            return place
    return -1
