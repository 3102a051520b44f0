"""The replay: a ring of timeline rows, drawn from uniformly or by priority, n steps at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from steadyrl.buffers.replay.block_sums import BlockSums
from steadyrl.buffers.replay.index import ReplayLayout, Timeline
from steadyrl.buffers.replay.sum_tree import NO_LEVELS, SumTree, check_leaves
from steadyrl.core.saved import Limits, Saved, check_limits, length, set_numpy_generator
from steadyrl.core.state import Stateful, give

NOTHING_YET = "replay: there is no complete transition to draw yet"


class ReplayBatch(NamedTuple):
    """B transitions; its tensors are reused by the next sample."""

    obs: Tensor  # [B, *observation_shape]
    action: Tensor  # [B] int64
    reward: Tensor  # [B] n-step return
    discount: Tensor  # [B] γ^m, 0 where the window ends in a termination
    next_obs: Tensor  # [B, *observation_shape]
    weight: Tensor  # [B] importance weights; ones when uniform
    index: Tensor  # type: ignore[assignment]  # [B] int64 transition ids, row * N + env


class ReplayBuffer(Stateful, ABC):
    """Store each observation once; rebuild stacks, n-step returns and successors when drawn.

    One class keeps the rows on the host, one on an accelerator. They give and take the same
    state and draw the same transitions, so what one saved the other can continue.
    """

    may_be_left_out = True

    def __init__(
        self, layout: ReplayLayout, priorities: SumTree | BlockSums | None, seed: int
    ) -> None:
        self._levels = priorities.levels if isinstance(priorities, SumTree) else NO_LEVELS
        self._layout, self.timeline = layout, Timeline(layout, self._levels)
        self._priorities = priorities
        self._random = np.random.Generator(np.random.PCG64(seed))
        self._newest = -layout.frame_shape[0]  # where the newest frame begins in a stack
        self._expected = (layout.num_envs, *layout.observation_shape)

    def __len__(self) -> int:
        """Return how many transitions can be drawn now."""
        return self.timeline.count

    @property
    def capacity(self) -> int:
        """Transitions kept at most: what was asked for, in whole rows."""
        return self._layout.span * self._layout.num_envs

    @property
    def lasts(self) -> bool:
        """Whether what has something to draw always has: one row has nothing after each episode."""
        return self._layout.span > 1

    @property
    def nbytes(self) -> int:
        """Bytes held, all included but the batch handed out."""
        priorities = self._priorities.nbytes if self._priorities else 0
        rows = sum(part.nbytes for part in self._stored().values())
        return self.timeline.nbytes + rows + priorities

    def start(self, obs: NDArray) -> None:
        """Take the first observations [N, *stacked shape]; what was under way is cut off.

        In the middle of an episode their older frames are rows of their own, never drawn: the
        stacks of the rows to come reach back to them.
        """
        if obs.shape != self._expected:
            raise self._misfit(obs)
        frames = np.split(obs, self._layout.frame_stack, axis=1)
        if all(np.array_equal(frame, frames[-1]) for frame in frames):  # as episodes begin
            frames = frames[-1:]
        valid = nothing = np.zeros(self._layout.num_envs, np.bool_)
        for number, frame in enumerate(frames):
            self.add(nothing, nothing, nothing, nothing, valid, self.stacked(frame))
            if not number:
                self.timeline.hold_back(len(frames) - 1)
                valid = ~nothing

    @abstractmethod
    def add(
        self,
        action: NDArray,
        reward: NDArray,
        terminated: NDArray,
        truncated: NDArray,
        valid: NDArray,
        next_obs: NDArray,
    ) -> None:
        """Store a row: arrays [N], and next_obs [N, *stacked shape] of which one frame is kept."""

    @abstractmethod
    def sample(self, n: int, *, beta: float = 1.0) -> ReplayBatch:
        """Draw n transitions, with repetition; the batch is reused by the next call."""

    @abstractmethod
    def update_priorities(self, index: Tensor, td_error: Tensor) -> None:
        """Set priorities from TD errors [B]; drawn transitions that are gone are left out."""

    def stacked(self, frame: NDArray) -> NDArray:
        """Return an observation [N, *stacked shape] all of whose frames are this one."""
        return np.concatenate([frame] * self._layout.frame_stack, axis=1)

    def start_within(self, frame: NDArray) -> None:
        """Begin with frames [N, …] of episodes under way, perhaps, whose older ones are lost."""
        self.start(self.stacked(frame))
        self.timeline.hold_back(self._layout.frame_stack - 1)

    # What replays that are learned from together must know of each other.

    @property
    def rarest(self) -> float:
        """Probability of the transition that is least likely to be drawn; its weight is 1."""
        assert self._priorities is not None
        return self._priorities.rarest

    @property
    def peak(self) -> float:
        """The largest error seen, which new transitions start with."""
        assert self._priorities is not None
        return float(self._priorities.peak)

    @peak.setter
    def peak(self, value: float) -> None:
        assert self._priorities is not None
        self._priorities.peak = value

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Take back what is drawn inside: it will be drawn again."""
        before = self._random.bit_generator.state
        try:
            yield
        finally:
            self._random.bit_generator.state = before

    def check_current(self, actions: int, obs: NDArray | None) -> None:
        """Raise ValueError for actions that are none of so many, and another newest frame."""
        stored, rows = self._stored(), self._filled()
        if not rows:
            raise ValueError("replay: has no rows, though it was begun")
        check_limits(stored["action"][:rows], Limits(0, actions - 1))
        if obs is not None:
            newest = stored["frames"][self.timeline.slot].cpu().numpy()
            if not np.array_equal(newest, obs[:, self._newest :].reshape(newest.shape)):
                raise ValueError("replay: its newest frames are not what the environments show")

    def clear(self) -> None:
        """Forget everything; the memory and the generator stay."""
        self.timeline.clear()  # rows that it does not know are never read
        if self._priorities is not None:
            self._priorities.clear()

    def release(self) -> None:
        """Free all memory; the buffer is not used afterwards."""
        vars(self).clear()

    @override
    def state_dict(self) -> dict[str, Any]:
        # Tensors share the buffer's memory: there may be no room for it twice.
        rows = self._filled()
        return {**self._about(), **{name: part[:rows] for name, part in self._stored().items()}}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.continue_from(state)
        rows = self._filled()
        for name, part in self._stored().items():
            part[:rows].copy_(self._rows_in(state, name, rows))

    # The same in pieces, for those who save it while it goes on: all but the rows, and rows by
    # their number, which counts from the run's start. Complete rows never change.

    @property
    def row(self) -> int:
        """Number of the open row, whose observation alone is known; −1 before the first."""
        return self.timeline.row

    @property
    def ring_rows(self) -> int:
        """How many rows there are before the oldest is overwritten."""
        return self._layout.rows

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row in all environments."""
        return self._layout.row_bytes * self._layout.num_envs

    def outline(self) -> dict[str, Any]:
        """Return a copy of all that is no row."""
        copied: dict[str, Any] = give(self._about())
        return copied

    def continue_from(self, outline: Mapping[str, Any]) -> None:
        """Take back all that is no row."""
        saved = Saved(outline, "replay")
        theirs, ours = saved.raw("layout"), self._layout.to_plain()
        if not isinstance(theirs, Mapping):
            raise ValueError("replay: its layout is no mapping")
        wrong = [
            f"{key}={theirs.get(key)} (here {ours[key]})"
            for key in ours
            if theirs.get(key) != ours[key]
        ]
        if wrong:
            raise ValueError(f"replay: saved with another shape: {', '.join(wrong)}")
        self.clear()
        self.timeline.load_state_dict(saved.raw("timeline"))
        if self._priorities is not None:
            leaves = saved.inside("priorities").raw("leaves")
            self._priorities.load_state_dict(saved.raw("priorities"))
            check_leaves(leaves, self.timeline.live)
        set_numpy_generator(self._random, saved.raw("random"))
        if "late" in saved and saved.raw("late") is not None:
            self._take_late(saved.inside("late"))

    def _take_late(self, late: Saved) -> None:
        """Take back errors that were on their way."""
        index = late.raw("index")
        count = length(index)
        index = late.tensor("index", (count,), torch.int64, 0, self._layout.slots - 1)
        wide = getattr(late.raw("error"), "dtype", None) == torch.float64
        error = late.tensor("error", (count,), torch.float64 if wide else torch.float32)
        if count:
            self.update_priorities(index, error)

    def read_rows(self, begin: int, end: int) -> dict[str, Tensor]:
        """Return a copy of rows begin … end − 1, [rows, N, …] each, on the host."""
        slots = torch.arange(begin, end) % self._layout.rows
        return {
            name: part.index_select(0, slots.to(part.device)).to("cpu")
            for name, part in self._stored().items()
        }

    def write_rows(self, begin: int, rows: Mapping[str, Tensor]) -> None:
        """Put back rows that `read_rows` gave, the first of them as number `begin`."""
        for name, part in self._stored().items():
            self._rows_in(rows, name, len(rows[name]))
            slots = torch.arange(begin, begin + len(rows[name])) % self._layout.rows
            part.index_copy_(0, slots.to(part.device), rows[name].to(part.device))

    def _rows_in(self, state: Mapping[str, Any], name: str, rows: int) -> Tensor:
        """Return so many saved rows, if they are such as are stored."""
        part = self._stored()[name]
        return Saved(state, "replay").tensor(name, (rows, *part.shape[1:]), part.dtype)

    def _about(self) -> dict[str, Any]:
        state = {
            "layout": self._layout.to_plain(),
            "random": self._random.bit_generator.state,
            "timeline": self.timeline.state_dict(),
        }
        if self._priorities is not None:
            slots = self._filled() * self._layout.num_envs
            state["priorities"] = self._priorities.state_dict(slots)
        return state

    @abstractmethod
    def _stored(self) -> dict[str, Tensor]:
        """Return what is saved of the rows, sharing memory: frames, action, reward."""

    def _filled(self) -> int:
        return min(self.timeline.row + 1, self._layout.rows)

    def _misfit(self, obs: NDArray) -> Exception:
        return ValueError(f"replay: observations {obs.shape} should be {self._expected}")
