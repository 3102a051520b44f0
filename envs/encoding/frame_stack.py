"""Frame stacking for N environments."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from steadyrl.envs.types import EnvSpec


class FrameStack:
    """Concatenates the last k frames of an episode along axis 0, oldest first.

    At an episode's start its first frame is repeated.
    """

    def __init__(self, spec: EnvSpec) -> None:
        self._frames, self._channels = spec.frame_stack, spec.frame_shape[0]
        shape = (spec.num_envs, *spec.observation_shape)
        self.stacks = (np.zeros(shape, spec.dtype), np.zeros(shape, spec.dtype))
        self.slot = 0

    @property
    def current(self) -> NDArray[Any]:
        """Current frame stacks [N, k·C, …]."""
        return self.stacks[self.slot]

    def push(self, frames: NDArray[Any], valid: NDArray[np.bool_]) -> NDArray[Any]:
        """Append frames [N, C, …] and return the stacks; where not valid, an episode starts."""
        before = self.current
        self.slot = 1 - self.slot
        stack = self.current
        stack[:, : -self._channels] = before[:, self._channels :]
        stack[:, -self._channels :] = frames
        if np.count_nonzero(valid) < valid.size:
            stack[~valid] = np.concatenate([frames[~valid]] * self._frames, axis=1)
        return stack
