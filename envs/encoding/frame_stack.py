"""Stack the last frames of each environment."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from steadyrl.envs.types import EnvSpec


class FrameStack:
    """Concatenate the last k frames of an episode along axis 0, oldest first.

    Before an episode's first frame the first frame is repeated.
    """

    def __init__(self, spec: EnvSpec) -> None:
        self._frames, self._channels = spec.frame_stack, spec.frame_shape[0]
        shape = (spec.num_envs, *spec.observation_shape)
        self.stacks = (np.zeros(shape, spec.dtype), np.zeros(shape, spec.dtype))
        self.slot = 0

    @property
    def current(self) -> NDArray[Any]:
        """The stacks [N, k·C, …] that end with the last row's frames."""
        return self.stacks[self.slot]

    def push(self, frames: NDArray[Any], valid: NDArray[np.bool_]) -> NDArray[Any]:
        """Take one more row of frames [N, C, …]; rows that are not valid begin an episode."""
        before = self.current
        self.slot = 1 - self.slot
        stack = self.current
        stack[:, : -self._channels] = before[:, self._channels :]
        stack[:, -self._channels :] = frames
        if np.count_nonzero(valid) < valid.size:
            stack[~valid] = np.concatenate([frames[~valid]] * self._frames, axis=1)
        return stack
