"""A kernel as an ordinary Gymnasium environment, for every other backend."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from steadyrl.envs.kernels.kernel import Kernel
from steadyrl.envs.kernels.pcg64 import words_of
from steadyrl.envs.kernels.state import NEEDS_RESET, Outcome, new_simulation


class KernelEnv(gym.Env[Any, Any]):
    """A kernel with N = 1; Gymnasium sets seeds and time limit."""

    def __init__(self, kernel: Kernel) -> None:
        if kernel.images and kernel.frame[0] >= min(kernel.frame[1:]):  # axes would be ambiguous
            reason = f"{kernel.frame} has not fewer channels than rows and columns"
            raise ValueError(f"a kernel's frame {reason}")
        if kernel.images:
            self.metadata = {**self.metadata, "image_axes": "chw"}
        lowest, highest = (0, 255) if kernel.images else (-np.inf, np.inf)
        self.observation_space = spaces.Box(
            lowest, highest, kernel.frame, np.dtype(kernel.dtype).type
        )
        self.action_space = kernel.action
        self._kernel = kernel
        self._sim = new_simulation(kernel, 1, limit=0, seed=None)
        flags = (np.zeros(1, np.bool_) for _ in range(3))
        obs = np.zeros((1, *kernel.frame), kernel.dtype)
        self._outcome = Outcome(obs, np.zeros(1, np.float32), *flags)
        # Kernels number discrete actions from 0 and flatten boxes.
        self._first = 0
        self._none: NDArray[Any]  # no action yet
        if isinstance(kernel.action, spaces.Discrete):
            self._first, self._none = int(kernel.action.start), np.zeros(1, np.int64)
        else:
            self._none = np.zeros((1, math.prod(kernel.action.shape)), np.float32)
        self._unseeded = True

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        """Start an episode; without a seed the generator continues."""
        super().reset(seed=seed)
        if seed is not None or self._unseeded:
            self._sim.generators[0] = words_of(self.np_random)
            self._unseeded = False
        self._sim.clock[0, NEEDS_RESET] = True
        return self._make(self._none), {}

    def step(self, action: Any) -> tuple[NDArray[Any], float, bool, bool, dict[str, Any]]:
        """Make one step."""
        given = np.asarray(action, self._none.dtype).reshape(self._none.shape)
        observation, outcome = self._make(given - self._first), self._outcome
        return observation, float(outcome.reward[0]), bool(outcome.terminated[0]), False, {}

    def _make(self, action: NDArray[Any]) -> NDArray[Any]:
        self._kernel.step(self._sim, action, self._outcome)
        seen: NDArray[Any] = self._outcome.obs[0].copy()
        return seen
