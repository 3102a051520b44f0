"""The arrays that one row of the timeline is written into."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs.types import EnvSpec


class Rows:
    """One row in all N environments, in one preallocated block of memory.

    The block is floats, then flags, then bytes, so that one product tells whether all floats are
    finite and one comparison tells whether the row is an ordinary one.
    """

    def __init__(self, spec: EnvSpec, block: NDArray[np.uint8] | None = None) -> None:
        n, size = spec.num_envs, math.prod(spec.frame_shape)
        self._num_envs = n
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

    def not_finite(self) -> tuple[str, int]:
        """Name the first array and environment that are not finite."""
        for name, array in (("reward", self.reward), ("observation", self.obs)):
            finite = np.isfinite(array.reshape(self._num_envs, -1)).all(axis=1)
            if not finite.all():
                return name, int(np.argmin(finite))
        raise ValueError("all numbers are finite")


def row_bytes(spec: EnvSpec) -> int:
    """Return how many bytes the block of one row takes."""
    frame = math.prod(spec.frame_shape) * (4 if spec.dtype == "float32" else 1)
    return spec.num_envs * (frame + 4 + 3)
