"""Rows of the timeline: the arrays they are written into, and the scores that add up over them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from steadyrl.core.saved import Saved
from steadyrl.envs.types import (
    ActionSpec,
    BoxActions,
    EnvSpec,
    MultiBinaryActions,
    MultiDiscreteActions,
)

MOST_EPISODES = 2**62

PER_ENV = ("kernel", "single")  # backends that know their environments one by one


class ScoreBoundaries(NamedTuple):
    """What one row means for the score, where that is not what it means for the learner."""

    reward: NDArray[Any]  # [N] of rows that reset it is zero
    begun: NDArray[np.bool_]  # [N] episodes that begin after this row
    ended: NDArray[np.bool_]  # [N] episodes that end with this row
    skipped: NDArray[np.bool_]  # [N] rows that count for the reward only


def load_progress(saved: Mapping[str, Any], envs: int) -> NDArray[np.int64]:
    """Return each environment's episode, and whether it is over [N, 2], of any backend's snapshot.

    Where it knows of a batch only, all begin anew.
    """
    progress = np.array([[-1, 1]] * envs)
    state = Saved(saved, "backend")
    if "episode" in state or backend_kind(state) in PER_ENV:
        progress.T[:] = (
            state.wholes("episode", envs, -1, MOST_EPISODES),
            state.booleans("needs_reset", envs),
        )
    elif "progress" in state:  # of earlier versions
        progress[:] = state.tensor("progress", (envs, 2), "int64", -1, MOST_EPISODES).numpy()
    new = progress[:, 0] < 0
    if new.any() and not (new.all() and progress[:, 1].all()):
        raise ValueError("backend.episode: is -1 of one environment, others have begun")
    return progress


def backend_kind(saved: Saved) -> str | None:
    """Return the kind of backend that gave a snapshot; None of earlier versions."""
    found = saved.raw("backend_kind") if "backend_kind" in saved else None
    if found not in (None, *PER_ENV, "batch"):
        raise ValueError("backend.made_by: no backend is called so")
    name: str | None = found
    return name


class StepBuffer:
    """One row in all N environments, in one preallocated block of memory.

    The block is floats, then flags, then bytes, so that one product tells whether all floats are
    finite and one comparison tells whether the row is an ordinary one.
    """

    def __init__(self, spec: EnvSpec, slot: int, block: NDArray[np.uint8] | None = None) -> None:
        n, size = spec.num_envs, math.prod(spec.frame_shape)
        self.slot = slot  # rows alternate: 0, 1, 0, …
        self.score_boundaries: ScoreBoundaries | None = (
            None  # where scores go by other ends than the learner's
        )
        block = np.zeros(buffer_bytes(spec), np.uint8) if block is None else block
        shape = (n, *spec.frame_shape)
        of_floats = n * size if spec.dtype == "float32" else 0
        self._floats = block[: 4 * (n + of_floats)].view(np.float32)
        block = block[self._floats.nbytes :]
        names = len(spec.info_metrics)
        # Where an episode ends: what its environment reports, and NaN where it does not.
        self.info = block[: 4 * n * names].view(np.float32).reshape(n, names)
        block = block[self.info.nbytes :]
        self.reward = self._floats[:n]
        flags = block[: 3 * n].view(np.bool_)
        self._flags = flags
        self.terminated, self.truncated, self.valid = flags.reshape(3, n)
        images = block[3 * n :]
        self.obs: NDArray[Any] = (self._floats[n:] if of_floats else images).reshape(shape)
        self.frames = list(self.obs)  # one view per environment
        self._ordinary = bytes(2 * n) + b"\1" * n

    def set_reset(self, env: int) -> None:
        """Mark the row of one environment as a reset; its frame is written by others."""
        self.reward[env] = 0.0
        self.terminated[env] = self.truncated[env] = self.valid[env] = False

    def set_all_reset(self) -> None:
        """Mark the row of every environment as a reset."""
        self.score_boundaries = None
        self.reward[:] = 0.0
        self._flags[:] = False

    def is_plain_step(self) -> bool:
        """Tell whether every environment made a step and no episode ended."""
        return self._flags.tobytes() == self._ordinary

    def is_finite(self) -> bool:
        """Tell whether rewards and observations are finite.

        One product answers it for all ordinary numbers; only where their squares overflow, or
        something is wrong, each is looked at.
        """
        floats = self._floats
        return math.isfinite(floats.dot(floats)) or bool(np.isfinite(floats).all())

    def first_non_finite(self) -> tuple[str, int, str]:
        """Name the first array and environment that are not finite, and the number in words."""
        for name, array in (("reward", self.reward), ("observation", self.obs)):
            finite = np.isfinite(array)
            if not finite.all():
                place = tuple(np.argwhere(~finite)[0].tolist())
                env, element = place[0], list(place[1:])
                number = f"element {element} is" if element else "it is"
                return name, env, f"{number} {array[place]}"
        raise ValueError("all numbers are finite")


def buffer_bytes(spec: EnvSpec) -> int:
    """Return how many bytes the block of one row takes."""
    frame = math.prod(spec.frame_shape) * (4 if spec.dtype == "float32" else 1)
    return spec.num_envs * (frame + 4 + 4 * len(spec.info_metrics) + 3)


class SharedStepBuffers:
    """Memory that processes share: two rows, one action per environment, and each one's progress.

    Progress [N, 2] is the number of the episode and whether it is over.
    """

    def __init__(self, spec: EnvSpec, memory: Any) -> None:
        n, out = spec.num_envs, buffer_bytes(spec)
        first, second, rest = np.split(
            np.frombuffer(memory, np.uint8), [_aligned(out), 2 * _aligned(out)]
        )
        self.buffers = (StepBuffer(spec, 0, first[:out]), StepBuffer(spec, 1, second[:out]))
        self.progress = rest[: 16 * n].view(np.int64).reshape(n, 2)
        dtype, shape = action_layout(spec.action)
        self.actions = rest[16 * n :].view(dtype).reshape(n, *shape)

    @staticmethod
    def size(spec: EnvSpec) -> int:
        """Return the bytes that all of it takes."""
        dtype, shape = action_layout(spec.action)
        action = math.prod(shape) * dtype.itemsize
        return 2 * _aligned(buffer_bytes(spec)) + spec.num_envs * (16 + action)


def _aligned(size: int) -> int:
    return -(-size // 64) * 64


def action_layout(spec: ActionSpec) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return the dtype and the shape of one action as agents send it."""
    if isinstance(spec, BoxActions):
        return np.dtype(np.float32), (len(spec.low),)
    if isinstance(spec, MultiDiscreteActions):
        return np.dtype(np.int64), (len(spec.nvec),)
    return np.dtype(np.int64), (spec.n,) if isinstance(spec, MultiBinaryActions) else ()
