"""Rows of the timeline: the arrays they are written into, and the scores that add up over them."""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.types import (
    ActionSpec,
    DiscreteActions,
    EnvSpec,
    Episode,
    MultiBinaryActions,
    MultiDiscreteActions,
)
from memory.state import Stateful

NUMBER_BYTES = 8  # the widest number an action consists of


class Ends(NamedTuple):
    """What one row means for the score, where that is not what it means for the learner."""

    reward: NDArray[Any]  # [N] of rows that reset it is zero
    begun: NDArray[np.bool_]  # [N] episodes that begin after this row
    ended: NDArray[np.bool_]  # [N] episodes that end with this row
    skipped: NDArray[np.bool_]  # [N] rows that count for the reward only


class Row:
    """One row in all N environments, in one preallocated block of memory.

    The block is floats, then flags, then bytes, so that one product tells whether all floats are
    finite and one comparison tells whether the row is an ordinary one.
    """

    def __init__(self, spec: EnvSpec, turn: int, block: NDArray[np.uint8] | None = None) -> None:
        n, size = spec.num_envs, math.prod(spec.frame_shape)
        self.turn = turn  # rows alternate: 0, 1, 0, …
        self.ends: Ends | None = None  # where scores go by other ends than the learner's
        block = np.zeros(row_bytes(spec), np.uint8) if block is None else block
        shape = (n, *spec.frame_shape)
        of_floats = n * size if spec.dtype == "float32" else 0
        self._floats = block[: 4 * (n + of_floats)].view(np.float32)
        self.reward = self._floats[:n]
        flags = block[self._floats.nbytes : self._floats.nbytes + 3 * n].view(np.bool_)
        self._flags = flags
        self.terminated, self.truncated, self.valid = flags.reshape(3, n)
        images = block[self._floats.nbytes + 3 * n :]
        self.obs: NDArray[Any] = (self._floats[n:] if of_floats else images).reshape(shape)
        self.frames = list(self.obs)  # one view per environment
        self._ordinary = bytes(2 * n) + b"\1" * n

    def set_reset(self, env: int) -> None:
        """Mark the row of one environment as a reset; its frame is written by others."""
        self.reward[env] = 0.0
        self.terminated[env] = self.truncated[env] = self.valid[env] = False

    def set_all_reset(self) -> None:
        """Mark the row of every environment as a reset."""
        self.ends = None
        self.reward[:] = 0.0
        self._flags[:] = False

    def is_ordinary(self) -> bool:
        """Tell whether every environment made a step and no episode ended."""
        return self._flags.tobytes() == self._ordinary

    def is_finite(self) -> bool:
        """Tell whether rewards and observations are finite.

        One product answers it for all ordinary numbers; only where their squares overflow, or
        something is wrong, each is looked at.
        """
        floats = self._floats
        return math.isfinite(floats.dot(floats)) or bool(np.isfinite(floats).all())

    def not_finite(self) -> tuple[str, int, str]:
        """Name the first array and environment that are not finite, and the number in words."""
        for name, array in (("reward", self.reward), ("observation", self.obs)):
            finite = np.isfinite(array)
            if not finite.all():
                place = tuple(np.argwhere(~finite)[0].tolist())
                env, element = place[0], list(place[1:])
                number = f"element {element} is" if element else "it is"
                return name, env, f"{number} {array[place]}"
        raise ValueError("all numbers are finite")


def row_bytes(spec: EnvSpec) -> int:
    """Return how many bytes the block of one row takes."""
    frame = math.prod(spec.frame_shape) * (4 if spec.dtype == "float32" else 1)
    return spec.num_envs * (frame + 4 + 3)


class SharedRows:
    """Memory that processes share: two rows, one action per environment, and each one's progress.

    Progress [N, 2] is the number of the episode and whether it is over.
    """

    def __init__(self, spec: EnvSpec, memory: Any) -> None:
        block = np.frombuffer(memory, np.uint8)
        n, row, action = spec.num_envs, row_bytes(spec), NUMBER_BYTES * action_numbers(spec.action)
        parts = np.split(block, np.cumsum([_aligned(row), _aligned(row), _aligned(n * action)]))
        self.rows = (Row(spec, 0, parts[0][:row]), Row(spec, 1, parts[1][:row]))
        self._actions = parts[2][: n * action].reshape(n, action)
        self.progress = parts[3].view(np.int64).reshape(n, 2)

    @staticmethod
    def size(spec: EnvSpec) -> int:
        """Return the bytes that all of it takes."""
        actions = spec.num_envs * NUMBER_BYTES * action_numbers(spec.action)
        return 2 * _aligned(row_bytes(spec)) + _aligned(actions) + 16 * spec.num_envs

    def put_actions(self, actions: NDArray[Any]) -> None:
        """Write one action [N, …] per environment."""
        flat = np.ascontiguousarray(actions).view(np.uint8).reshape(len(self._actions), -1)
        self._actions[:, : flat.shape[1]] = flat

    def action(self, index: int, form: ActionForm) -> NDArray[Any]:
        """Return a copy of one environment's action as a batch of one."""
        return form.read(self._actions[index, : form.nbytes])


class ActionForm:
    """The dtype and shape of one action, as text that can be sent."""

    def __init__(self, dtype: str, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape = dtype, shape
        self.nbytes = math.prod(shape) * np.dtype(dtype).itemsize

    @classmethod
    def of(cls, actions: NDArray[Any]) -> ActionForm:
        """Return the form of a batch of actions [N, …]."""
        return cls(actions.dtype.str, actions.shape[1:])

    @classmethod
    def decode(cls, text: bytes) -> ActionForm:
        """Read what `encode` wrote."""
        dtype, shape = json.loads(text)
        return cls(dtype, tuple(shape))

    def encode(self) -> bytes:
        """Write the form as text."""
        return json.dumps([self.dtype, self.shape]).encode()

    def read(self, data: Any) -> NDArray[Any]:
        """Return a copy of actions [T, …] that lie one after the other."""
        actions: NDArray[Any] = np.array(np.frombuffer(data, self.dtype))
        return actions.reshape(-1, *self.shape)

    def matches(self, actions: NDArray[Any]) -> bool:
        """Tell whether a batch [N, …] is of this form."""
        return actions.dtype.str == self.dtype and actions.shape[1:] == self.shape


def _aligned(size: int) -> int:
    return -(-size // 64) * 64


def action_numbers(spec: ActionSpec) -> int:
    """Return how many numbers one action consists of."""
    if isinstance(spec, DiscreteActions):
        return 1
    if isinstance(spec, MultiDiscreteActions):
        return len(spec.nvec)
    return spec.n if isinstance(spec, MultiBinaryActions) else len(spec.low)


class EpisodeStatistics(Stateful):
    """Running return and length of each environment's episode, of valid rows only."""

    state_names = ("_return", "_rows", "_begin")

    def __init__(self, num_envs: int) -> None:
        self._return = np.zeros(num_envs)
        self._rows = 0  # rows recorded
        self._begin = np.zeros(num_envs, np.int64)  # rows recorded before the episode's first

    def clear(self) -> None:
        """Forget the episodes under way."""
        self._return[:] = 0.0
        self._begin[:] = self._rows

    def record(self, row: Row) -> tuple[Episode, ...]:
        """Count one row and return the episodes it ended.

        An invalid row starts an episode; what an environment had collected before a cut is dropped.
        """
        self._rows += 1
        if row.ends is not None:
            self._return += row.ends.reward
            self._begin += row.ends.skipped
            return self._close(row.ends.begun, row.ends.ended)
        self._return += row.reward
        if row.is_ordinary():
            return ()
        return self._close(~row.valid, row.terminated | row.truncated)

    def _close(self, begun: NDArray[np.bool_], ended: NDArray[np.bool_]) -> tuple[Episode, ...]:
        self._restart(begun)
        finished = tuple(
            Episode(env, float(self._return[env]), int(self._rows - self._begin[env]))
            for env in np.flatnonzero(ended).tolist()
        )
        self._restart(ended)
        return finished

    def _restart(self, where: NDArray[np.bool_]) -> None:
        self._return[where] = 0.0
        self._begin[where] = self._rows


class FrameStack:
    """Concatenate the last k frames of an episode along axis 0, oldest first.

    Before an episode's first frame the first frame is repeated.
    """

    def __init__(self, spec: EnvSpec) -> None:
        self._frames, self._channels = spec.frame_stack, spec.frame_shape[0]
        shape = (spec.num_envs, *spec.observation_shape)
        self._stacks = (np.zeros(shape, spec.dtype), np.zeros(shape, spec.dtype))
        self._turn = 0

    @property
    def now(self) -> NDArray[Any]:
        """The stacks [N, k·C, …] that end with the last row's frames."""
        return self._stacks[self._turn]

    def push(self, frames: NDArray[Any], valid: NDArray[np.bool_]) -> NDArray[Any]:
        """Take one more row of frames [N, C, …]; rows that are not valid begin an episode."""
        before = self.now
        self._turn = 1 - self._turn
        stack = self.now
        stack[:, : -self._channels] = before[:, self._channels :]
        stack[:, -self._channels :] = frames
        if np.count_nonzero(valid) < valid.size:
            stack[~valid] = np.concatenate([frames[~valid]] * self._frames, axis=1)
        return stack
