"""Bookkeeping of the replay ring: episode boundaries, and which transitions may be sampled.

Glossary:
- timestep: one step of all N environments. Numbered from the start of the run; number t is stored
  in ring entry `t % ring_size`. The *pending* one has an observation but no action yet.
- slot: one environment's timestep in the ring; a transition's id is the slot of its first timestep,
  `(t % ring_size) * N + env`.
- window: the up to n timesteps of an n-step transition (of other samples: up to `reach`). Its first
  one is the transition's *start*.
- span: sampleable starts per environment at most. `ring_size` is larger by the timesteps that
  windows and frame stacks of these starts reach ahead and back.
- added / evicted: a start becomes sampleable when its window is complete or its episode has ended,
  and stops being so before the ring overwrites anything that the transition reads.
- skipped: a timestep that is no start, because frames of its own stack are not in the ring.
- invalid: the timestep in which an environment resets; it holds the last observation of the episode
  before, which has no action.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from steadyrl.buffers.memory_layout import IS_TERMINATED, IS_TRUNCATED, IS_VALID, prefaulted_zeros
from steadyrl.buffers.replay.sum_tree import Levels, set_leaves
from steadyrl.core.jit import jit
from steadyrl.core.saved_state import ANY_WHOLE, LARGEST, Limits
from steadyrl.core.state import Stateful

VALID, TERMINATED, ENDED, SKIPPED = 1, 2, 4, 8  # bits of a slot's flags
# Rows of `cursors` [3, N]: the first timestep that is no start yet; head and length of the FIFO.
NEXT_START, HEAD, LENGTH = 0, 1, 2
ALL = slice(None)
UNSKIPPED = (0, VALID, VALID | ENDED, VALID | ENDED | TERMINATED)
FLAGS = (*UNSKIPPED, *(flags | SKIPPED for flags in UNSKIPPED[1:]))


@dataclass(frozen=True, kw_only=True)
class ReplayLayout:
    """Shape of the ring: `span` starts per environment and the timesteps their windows read."""

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
        """Transitions per environment: capacity / N, rounded up."""
        return -(-self.capacity // self.num_envs)

    @property
    def ring_size(self) -> int:
        """Timesteps in the ring: windows reach ahead, frame stacks frame_stack − 1 back."""
        return self.span + self.reach + self.frame_stack - 1

    @property
    def reach(self) -> int:
        """Timesteps of a window at most; other samples than n-step transitions may have more."""
        return self.n_step

    @property
    def read_by_one(self) -> str:
        """What decides how much one transition reads, for errors."""
        return f"n_step={self.n_step:,} and frame_stack={self.frame_stack:,}"

    @property
    def slots(self) -> int:
        """Number of slots, and of transition ids: ring_size * num_envs."""
        return self.ring_size * self.num_envs

    @property
    def frame_size(self) -> int:
        """Elements of one frame."""
        return math.prod(self.frame_shape)

    @property
    def observation_shape(self) -> tuple[int, ...]:
        """Shape of a stacked observation: frames concatenated along the first axis."""
        return (self.frame_stack * self.frame_shape[0], *self.frame_shape[1:])

    @property
    def timestep_dtype(self) -> np.dtype[Any]:
        """Smallest integer dtype that holds every position in the ring."""
        return np.dtype(np.int32 if self.ring_size <= np.iinfo(np.int32).max else np.int64)

    @property
    def slot_bytes(self) -> int:
        """Stored bytes per slot: frame, action and reward."""
        return self.frame_size * np.dtype(self.dtype).itemsize + 8 + 4

    def to_plain(self) -> dict[str, Any]:
        """Return the layout as plain values; a saved replay must have the same."""
        return {**asdict(self), "frame_shape": list(self.frame_shape)}


@jit
def add_and_evict(  # type: ignore[no-untyped-def]
    sampleable, cursors, added, evicted, env, timestep, begin, end, ring_size, reach, num_added,
    num_evicted,
):  # fmt: skip
    """Add the starts begin … end − 1 of one environment and evict its oldest ones.

    Appends ids to `added` and `evicted`, which hold `num_added` and `num_evicted`; returns the new
    counts.
    """
    envs, span = sampleable.shape
    first, count = cursors[HEAD, env], cursors[LENGTH, env]
    for start in range(begin, end):
        if count == span:
            evicted[num_evicted] = sampleable[env, first] * envs + env
            num_evicted += 1
            first = (first + 1) % span
            count -= 1
        sampleable[env, (first + count) % span] = start % ring_size
        count += 1
        added[num_added] = (start % ring_size) * envs + env
        num_added += 1
    # Invalid timesteps take ring entries too, so starts are evicted by age as well as by count.
    while count > 0 and (timestep - sampleable[env, first]) % ring_size >= span + reach - 1:
        evicted[num_evicted] = sampleable[env, first] * envs + env
        num_evicted += 1
        first = (first + 1) % span
        count -= 1
    cursors[HEAD, env], cursors[LENGTH, env] = first, count
    return num_added, num_evicted


@jit
def close_timestep(  # type: ignore[no-untyped-def]
    flags, sampleable, cursors, added, evicted, step_flags, timestep, reach, nodes, minima,
    offsets, initial_priority,
):  # fmt: skip
    """Set the flags of `timestep` and update which starts may be sampled.

    flags [R, N]; sampleable [N, span], a FIFO of starts per environment; cursors [3, N];
    step_flags [3, N]. Writes the ids of added and evicted starts into `added` and `evicted` and
    returns how many, or -1 - env (and changes nothing) if a valid timestep follows an episode's
    end. In the priority tree (nodes, minima, offsets; empty: none) added starts get
    `initial_priority`, evicted ones 0.
    """
    ring_size, envs = flags.shape
    entry, before = timestep % ring_size, (timestep - 1) % ring_size
    for env in range(envs):
        if step_flags[IS_VALID, env] and flags[before, env] & ENDED:
            return -1 - env, 0
    num_added = num_evicted = 0
    for env in range(envs):
        begin = cursors[NEXT_START, env]
        skipped = SKIPPED if begin > timestep else 0
        if not step_flags[IS_VALID, env]:
            if flags[before, env] & VALID:  # a reset without an end truncates the timestep before
                flags[before, env] |= ENDED
            flags[entry, env] = 0
            end = timestep
            cursors[NEXT_START, env] = timestep + 1
        elif step_flags[IS_TERMINATED, env] or step_flags[IS_TRUNCATED, env]:
            terminated = TERMINATED if step_flags[IS_TERMINATED, env] else 0
            flags[entry, env] = VALID | ENDED | terminated | skipped
            end = timestep + 1
            cursors[NEXT_START, env] = end
        else:
            flags[entry, env] = VALID | skipped
            end = max(begin, timestep + 2 - reach)
            cursors[NEXT_START, env] = end
        num_added, num_evicted = add_and_evict(
            sampleable, cursors, added, evicted, env, timestep, begin, end, ring_size, reach,
            num_added, num_evicted,
        )  # fmt: skip
    if len(nodes):
        set_leaves(
            nodes, minima, offsets, initial_priority, added[:num_added], evicted[:num_evicted]
        )
    return num_added, num_evicted


@jit
def draw_uniform(sampleable, cursors, uniform, index):  # type: ignore[no-untyped-def]
    """Map uniform numbers in [0, 1) to sampleable ids, uniformly."""
    envs, span = sampleable.shape
    upto = np.cumsum(cursors[LENGTH])
    total = upto[-1]
    for b in range(index.shape[0]):
        rank = min(int(uniform[b] * total), total - 1)
        env = np.searchsorted(upto, rank, side="right") if envs > 1 else 0
        place = rank - (upto[env] - cursors[LENGTH, env])
        index[b] = sampleable[env, (cursors[HEAD, env] + place) % span] * envs + env


class Timeline(Stateful):
    """Flags, cursors and sampleable starts of a replay; always in host memory."""

    state_names: ClassVar[tuple[str, ...]] = (
        "timestep",
        "count",
        "flags",
        "_sampleable",
        "_cursors",
    )
    state_limits: ClassVar[Mapping[str, Limits]] = {"timestep": ANY_WHOLE, "count": Limits(0)}

    def __init__(self, layout: ReplayLayout, levels: Levels) -> None:
        """Allocate; with a priority tree (`levels`), priorities are set when starts come and go."""
        envs, reach = layout.num_envs, layout.reach
        self._ring_size, self._reach = layout.ring_size, reach
        self.timestep = -1  # nothing observed yet
        self.count = 0  # sampleable starts, over all environments
        self.flags: NDArray[np.uint8] = prefaulted_zeros((layout.ring_size, envs), np.uint8)
        self._sampleable: NDArray[np.integer] = prefaulted_zeros(
            (envs, layout.span), layout.timestep_dtype
        )
        self._cursors: NDArray[np.int64] = prefaulted_zeros((3, envs), np.int64)
        self._added: NDArray[np.int64] = prefaulted_zeros((envs * reach,), np.int64)
        self._evicted: NDArray[np.int64] = prefaulted_zeros((envs * (reach + 1),), np.int64)
        self._step_flags: NDArray[np.bool_] = prefaulted_zeros((3, envs), np.bool_)
        self._levels = levels

    @staticmethod
    def bytes_needed(layout: ReplayLayout) -> int:
        """Return the bytes of a timeline, flags included."""
        envs = layout.num_envs
        sampleable = layout.timestep_dtype.itemsize * envs * layout.span
        return layout.slots + sampleable + envs * (8 * (4 + 2 * layout.reach) + 3)

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return sum(part.nbytes for part in vars(self).values() if isinstance(part, np.ndarray))

    @property
    def entry(self) -> int:
        """Ring entry of the pending timestep."""
        return self.timestep % self._ring_size

    def advance(
        self, terminated: NDArray, truncated: NDArray, valid: NDArray, initial_priority: float = 0.0
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Complete the pending timestep; return added and evicted ids (in both: evicted).

        The first timestep, and the first after a restart, must be invalid in every environment.
        """
        if self.timestep < 0 and np.any(valid):
            raise RuntimeError("replay: call start() with the first observations before add()")
        step_flags = self._step_flags  # a copy of fixed dtype and layout, so Numba compiles once
        step_flags[IS_TERMINATED] = terminated
        step_flags[IS_TRUNCATED] = truncated
        step_flags[IS_VALID] = valid
        added, evicted = close_timestep(
            self.flags, self._sampleable, self._cursors, self._added, self._evicted, step_flags,
            self.timestep, self._reach, *self._levels, initial_priority,
        )  # fmt: skip
        self.raise_if_invalid(added)
        self.timestep += 1
        self.count += added - evicted
        return self._added[:added], self._evicted[:evicted]

    def skip(self, count: int, envs: NDArray[np.bool_] | slice = ALL) -> None:
        """Make the next `count` timesteps, from the pending one on, no starts of transitions.

        Those right before, in these environments, must be invalid or skipped.
        """
        self._cursors[NEXT_START, envs] = self.timestep + count

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """Array arguments of `close_timestep`."""
        cursors = self._cursors
        return self.flags, self._sampleable, cursors, self._added, self._evicted, self._step_flags

    @staticmethod
    def raise_if_invalid(added: int) -> None:
        """Raise ValueError for a negative return value of `close_timestep`."""
        if added < 0:
            raise ValueError(
                f"replay: environment {-1 - added} sent a valid timestep right after an episode's"
                " end; the timestep that resets must have valid=False"
            )

    def draw(self, uniform: NDArray[np.float64], index: NDArray[np.int64]) -> None:
        """Write one sampleable id per uniform number in [0, 1)."""
        draw_uniform(self._sampleable, self._cursors, uniform, index)

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; raise ValueError if it would make kernels index out of bounds."""
        try:
            super().load_state_dict(state)
            self._check_ranges()
        except ValueError as error:
            self.clear()
            raise ValueError(f"replay: inconsistent timeline: {error}") from None

    def _check_ranges(self) -> None:
        envs, span = self._sampleable.shape
        next_start, head, length = self._cursors
        _within("timestep", np.array([self.timestep]), -1, LARGEST - 2 * self._ring_size)
        _within("flags", self.flags, 0, max(FLAGS))
        if not np.isin(self.flags, FLAGS).all():
            raise ValueError(f"flags: must be one of {FLAGS}")
        _within("sampleable", self._sampleable, 0, self._ring_size - 1)
        _within("cursors (head)", head, 0, span - 1)
        _within("cursors (length)", length, 0, span)
        # At most one frame stack of timesteps is skipped, for which the ring has entries.
        least, most = max(0, self.timestep + 1 - self._reach), self.timestep + self._ring_size
        begin = 0 if self.timestep < 0 else least
        _within("cursors (next start)", next_start, begin, max(0, most))
        if self.count != length.sum():
            raise ValueError(f"count: is {self.count}, its environments have {length.tolist()}")
        for env in range(envs):
            positions = (head[env] + np.arange(length[env])) % span
            self._check_starts(env, self._sampleable[env, positions].astype(np.int64))

    def _check_starts(self, env: int, starts: NDArray[np.int64]) -> None:
        """Raise ValueError for starts (oldest first) out of order, too old, missing or invalid."""
        ages = (self.timestep - starts) % self._ring_size
        oldest = min(self.timestep, self._sampleable.shape[1] + self._reach - 1)
        age_of_next = self.timestep - int(self._cursors[NEXT_START, env])  # it is no start yet
        if len(ages) and not (
            (np.diff(ages) < 0).all()
            and ages[0] <= oldest
            and ages[-1] > max(0, age_of_next)
            and (self.flags[starts, env] & (VALID | SKIPPED) == VALID).all()
        ):
            raise ValueError(
                f"sampleable: {starts.tolist()[:8]} of environment {env} are not starts"
            )

    @property
    def sampleable_ids(self) -> NDArray[np.int64]:
        """Ids of all transitions that can be sampled."""
        envs, span = self._sampleable.shape
        positions = (self._cursors[HEAD][:, None] + np.arange(span)) % span
        living = np.arange(span) < self._cursors[LENGTH][:, None]
        ids = np.take_along_axis(self._sampleable.astype(np.int64), positions, 1) * envs
        found: NDArray[np.int64] = (ids + np.arange(envs)[:, None])[living]
        return found

    def clear(self) -> None:
        """Reset to empty; memory stays allocated."""
        self.timestep = -1
        self.count = 0
        for array in (self.flags, self._sampleable, self._cursors):
            array.fill(0)


def _within(name: str, numbers: NDArray[Any], least: int, most: int) -> None:
    if ((numbers < least) | (numbers > most)).any():
        found = f"{numbers.min()} to {numbers.max()}"
        raise ValueError(f"{name}: holds {found}, it can be {least} to {most}")
