"""Which rows of the ring may be sampled: the bookkeeping of episode ends, n-step windows and age.

Row numbers are absolute (they only grow); their slot in the ring is `row % rows`. `row` is the
pending row: its observation is known, its action is not. A start is *born* when its n-step window
is complete or its episode has ended, and *dead* before the ring overwrites anything it reads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from steadyrl.buffers.replay.sum_tree import NO_LEVELS, Levels, set_leaves
from steadyrl.buffers.transfer import touched_zeros
from steadyrl.core.jit import compiled
from steadyrl.core.saved import ANY_WHOLE, LARGEST, Limits
from steadyrl.core.state import Stateful

VALID, TERMINATED, ENDED = 1, 2, 4  # bits of a row's flags
OPEN, FIRST, COUNT = 0, 1, 2  # rows of `cursors`
FLAGS = (0, VALID, VALID | ENDED, VALID | ENDED | TERMINATED)
IS_TERMINATED, IS_TRUNCATED, IS_VALID = 0, 1, 2  # rows of `given`


@dataclass(frozen=True, kw_only=True)
class ReplayLayout:
    """The ring of rows: `span` rows of whole transitions and the rows their windows read."""

    capacity: int
    frame_shape: tuple[int, ...]
    dtype: str
    frame_stack: int
    num_envs: int
    n_step: int
    prioritized: bool

    def __post_init__(self) -> None:
        for name in ("capacity", "frame_stack", "num_envs", "n_step"):
            if getattr(self, name) < 1:
                raise ValueError(f"replay: {name}={getattr(self, name)} must be at least 1")
        if not self.frame_shape:
            raise ValueError("replay: frame_shape must have at least one axis")

    @property
    def span(self) -> int:
        """Transitions kept per environment."""
        return -(-self.capacity // self.num_envs)

    @property
    def rows(self) -> int:
        """Rows of the ring: a window reaches n_step rows ahead and frame_stack − 1 back."""
        return self.span + self.n_step + self.frame_stack - 1

    @property
    def slots(self) -> int:
        """Transition ids: row * num_envs + environment."""
        return self.rows * self.num_envs

    @property
    def frame_size(self) -> int:
        """Numbers in one frame."""
        return math.prod(self.frame_shape)

    @property
    def observation_shape(self) -> tuple[int, ...]:
        """Shape of what the agent sees: frames side by side on the first axis."""
        return (self.frame_stack * self.frame_shape[0], *self.frame_shape[1:])

    @property
    def row_type(self) -> np.dtype[Any]:
        """Type of a row's place in the ring: the smallest that holds them all."""
        return np.dtype(np.int32 if self.rows <= np.iinfo(np.int32).max else np.int64)

    @property
    def row_bytes(self) -> int:
        """Bytes of what is stored per slot: frame, action and reward."""
        return self.frame_size * np.dtype(self.dtype).itemsize + 8 + 4

    def to_plain(self) -> dict[str, Any]:
        """Return what a saved replay must agree on, as plain values."""
        return {**asdict(self), "frame_shape": list(self.frame_shape)}


@compiled
def admit(  # type: ignore[no-untyped-def]
    alive, cursors, born, dead, env, row, begin, end, rows, n_step, births, deaths
):
    """Let the starts begin … end − 1 of one environment in and its oldest ones out.

    Appends to born and dead, which hold `births` and `deaths` ids; returns the new counts.
    """
    envs, span = alive.shape
    first, count = cursors[FIRST, env], cursors[COUNT, env]
    for start in range(begin, end):
        if count == span:
            dead[deaths] = alive[env, first] * envs + env
            deaths += 1
            first = (first + 1) % span
            count -= 1
        alive[env, (first + count) % span] = start % rows
        count += 1
        born[births] = (start % rows) * envs + env
        births += 1
    # Ghost rows take room too, so age decides beside the count.
    while count > 0 and (row - alive[env, first]) % rows >= span + n_step - 1:
        dead[deaths] = alive[env, first] * envs + env
        deaths += 1
        first = (first + 1) % span
        count -= 1
    cursors[FIRST, env], cursors[COUNT, env] = first, count
    return births, deaths


@compiled
def close_row(  # type: ignore[no-untyped-def]
    flags, alive, cursors, born, dead, given, row, n_step, nodes, minima, offsets, newcomers
):
    """Set the flags of `row`, move the cursors and list the starts born and dead by it.

    The tree of nodes, minima and offsets, if there is one, learns of both: born ones get the
    priority `newcomers`.

    flags [rows, N], alive [N, span] rows that may be sampled (a FIFO per environment),
    cursors [3, N], given [3, N]; returns how many ids stand in born and in dead, or -1 - env if a
    valid row follows the end of an episode (then nothing is changed).
    """
    rows, envs = flags.shape
    slot, before = row % rows, (row - 1) % rows
    for env in range(envs):
        if given[IS_VALID, env] and flags[before, env] & ENDED:
            return -1 - env, 0
    births = deaths = 0
    for env in range(envs):
        begin = cursors[OPEN, env]
        if not given[IS_VALID, env]:
            if flags[before, env] & VALID:
                flags[before, env] |= ENDED  # a cut is a truncation of the row before it
            flags[slot, env] = 0
            end = row
            cursors[OPEN, env] = row + 1
        elif given[IS_TERMINATED, env] or given[IS_TRUNCATED, env]:
            flags[slot, env] = VALID | ENDED | (TERMINATED if given[IS_TERMINATED, env] else 0)
            end = row + 1
            cursors[OPEN, env] = end
        else:
            flags[slot, env] = VALID
            end = max(begin, row + 2 - n_step)
            cursors[OPEN, env] = end
        births, deaths = admit(
            alive, cursors, born, dead, env, row, begin, end, rows, n_step, births, deaths
        )
    if len(nodes):
        set_leaves(nodes, minima, offsets, newcomers, born[:births], dead[:deaths])
    return births, deaths


@compiled
def pick_uniform(alive, cursors, uniform, index):  # type: ignore[no-untyped-def]
    """Map numbers in [0, 1) to sampleable ids, all equally likely."""
    envs, span = alive.shape
    upto = np.cumsum(cursors[COUNT])
    total = upto[-1]
    for b in range(index.shape[0]):
        rank = min(int(uniform[b] * total), total - 1)
        env = np.searchsorted(upto, rank, side="right") if envs > 1 else 0
        place = rank - (upto[env] - cursors[COUNT, env])
        index[b] = alive[env, (cursors[FIRST, env] + place) % span] * envs + env


class Timeline(Stateful):
    """Flags, episode cursors and the sampleable rows of a replay; always on the host."""

    state_names: ClassVar[tuple[str, ...]] = ("row", "count", "flags", "_alive", "_cursors")
    state_limits: ClassVar[Mapping[str, Limits]] = {"row": ANY_WHOLE, "count": Limits(0)}

    def __init__(self, layout: ReplayLayout, levels: Levels = NO_LEVELS) -> None:
        """Keep what belongs to a row; a tree of these levels lets starts in and out with it."""
        envs, n_step = layout.num_envs, layout.n_step
        self._rows, self._n_step = layout.rows, n_step
        self.row = -1  # nothing observed yet
        self.count = 0  # sampleable starts, over all environments
        self.flags: NDArray[np.uint8] = touched_zeros((layout.rows, envs), np.uint8)
        self._alive: NDArray[np.integer] = touched_zeros((envs, layout.span), layout.row_type)
        self._cursors: NDArray[np.int64] = touched_zeros((3, envs), np.int64)
        self._born: NDArray[np.int64] = touched_zeros((envs * n_step,), np.int64)
        self._dead: NDArray[np.int64] = touched_zeros((envs * (n_step + 1),), np.int64)
        self._given: NDArray[np.bool_] = touched_zeros((3, envs), np.bool_)
        self._levels = levels

    @staticmethod
    def bytes_needed(layout: ReplayLayout) -> int:
        """Return the bytes of a timeline, flags included."""
        envs = layout.num_envs
        alive = layout.row_type.itemsize * envs * layout.span
        return layout.slots + alive + envs * (8 * (4 + 2 * layout.n_step) + 3)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(part.nbytes for part in vars(self).values() if isinstance(part, np.ndarray))

    @property
    def slot(self) -> int:
        """Where in the ring the pending row is."""
        return self.row % self._rows

    def advance(
        self, terminated: NDArray, truncated: NDArray, valid: NDArray, newcomers: float = 0.0
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Close the pending row; return the ids born and dead (those in both are dead).

        Rows begin, or begin anew after a cut, with one that is valid in no environment.
        """
        if self.row < 0 and np.any(valid):
            raise RuntimeError("replay: call start() with the first observations before add()")
        given = self._given  # our own copy: one dtype and layout, so one compilation
        given[IS_TERMINATED] = terminated
        given[IS_TRUNCATED] = truncated
        given[IS_VALID] = valid
        born, dead = close_row(
            self.flags, self._alive, self._cursors, self._born, self._dead, given,
            self.row, self._n_step, *self._levels, newcomers,
        )  # fmt: skip
        self.refuse_wrong(born)
        self.row += 1
        self.count += born - dead
        return self._born[:born], self._dead[:dead]

    def hold_back(self, rows: int) -> None:
        """Let none of so many rows be drawn, from the pending one on, unless episodes end."""
        self._cursors[OPEN] += rows

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """What `close_row` works on."""
        cursors = self._cursors
        return self.flags, self._alive, cursors, self._born, self._dead, self._given

    @staticmethod
    def refuse_wrong(born: int) -> None:
        """Raise what `close_row` says of a row by a negative number."""
        if born < 0:
            raise ValueError(
                f"replay: environment {-1 - born} sent a valid row right after an episode's end;"
                " the row that resets must have valid=False"
            )

    def pick(self, uniform: NDArray[np.float64], index: NDArray[np.int64]) -> None:
        """Write one sampleable id per number in [0, 1), all equally likely."""
        pick_uniform(self._alive, self._cursors, uniform, index)

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state back, if no kernel would be led outside of the arrays by it."""
        try:
            super().load_state_dict(state)
            self._check_ranges()
        except ValueError as error:
            self.clear()
            raise ValueError(f"replay: its cursors lead nowhere: {error}") from None

    def _check_ranges(self) -> None:
        envs, span = self._alive.shape
        opened, first, count = self._cursors[OPEN], self._cursors[FIRST], self._cursors[COUNT]
        _within("row", np.array([self.row]), -1, LARGEST - 2 * self._rows)
        _within("flags", self.flags, 0, VALID | TERMINATED | ENDED)
        if not np.isin(self.flags, FLAGS).all():
            raise ValueError(f"flags: a row is valid, ended or terminated: one of {FLAGS}")
        _within("alive", self._alive, 0, self._rows - 1)
        _within("cursors (first)", first, 0, span - 1)
        _within("cursors (count)", count, 0, span)
        # What is held back is a stack of frames at most, which the ring has room for.
        least, most = max(0, self.row + 1 - self._n_step), self.row + self._rows
        _within("cursors (open)", opened, 0 if self.row < 0 else least, max(0, most))
        if self.count != count.sum():
            raise ValueError(f"count: is {self.count}, those of its environments {count.tolist()}")
        for env in range(envs):
            places = (first[env] + np.arange(count[env])) % span
            self._check_starts(env, self._alive[env, places].astype(np.int64))

    def _check_starts(self, env: int, starts: NDArray[np.int64]) -> None:
        """Refuse starts, oldest first, that are in no order, too old, not stored or not valid."""
        ages = (self.row - starts) % self._rows
        oldest = min(self.row, self._alive.shape[1] + self._n_step - 1)
        opened = self.row - int(self._cursors[OPEN, env])  # age of the first that is none yet
        if len(ages) and not (
            (np.diff(ages) < 0).all()
            and ages[0] <= oldest
            and ages[-1] > max(0, opened)
            and (self.flags[starts, env] & VALID).all()
        ):
            raise ValueError(
                f"alive: rows {starts.tolist()[:8]} of environment {env} were no starts"
            )

    @property
    def live(self) -> NDArray[np.int64]:
        """The ids of all transitions that can be drawn."""
        envs, span = self._alive.shape
        places = (self._cursors[FIRST][:, None] + np.arange(span)) % span
        living = np.arange(span) < self._cursors[COUNT][:, None]
        ids = np.take_along_axis(self._alive.astype(np.int64), places, 1) * envs
        found: NDArray[np.int64] = (ids + np.arange(envs)[:, None])[living]
        return found

    def clear(self) -> None:
        """Forget everything; the memory stays."""
        self.row = -1
        self.count = 0
        for array in (self.flags, self._alive, self._cursors):
            array.fill(0)


def _within(name: str, numbers: NDArray[Any], least: int, most: int) -> None:
    if ((numbers < least) | (numbers > most)).any():
        found = f"{numbers.min()} to {numbers.max()}"
        raise ValueError(f"{name}: holds {found}, it can be {least} to {most}")
