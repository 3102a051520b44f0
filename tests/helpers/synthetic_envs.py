"""Random but identifiable timesteps of N environments with frame stacking."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Timestep(NamedTuple):
    action: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    valid: np.ndarray
    next_obs: np.ndarray


@dataclass(frozen=True)
class EnvConfig:
    """Shapes and episode statistics of the environments."""

    num_envs: int = 1
    frame_shape: tuple[int, ...] = (2,)
    dtype: str = "float32"
    frame_stack: int = 1
    mean_length: float = 5.0
    crash_rate: float = 0.0


class SyntheticEnvs:
    """Environments whose episodes end, reset in the next timestep, and sometimes crash."""

    def __init__(self, scene: EnvConfig, seed: int) -> None:
        self.scene = scene
        self.random = np.random.default_rng(seed)
        self.stacks = [deque(maxlen=scene.frame_stack) for _ in range(scene.num_envs)]
        self.left = [0] * scene.num_envs  # steps left per episode; 0: reset next

    def _frame(self) -> np.ndarray:
        if self.scene.dtype == "uint8":
            return self.random.integers(0, 256, self.scene.frame_shape, dtype=np.uint8)
        return self.random.standard_normal(self.scene.frame_shape).astype(np.float32)

    def _reset(self, env: int) -> None:
        frame = self._frame()
        self.stacks[env].extend([frame] * self.scene.frame_stack)
        self.left[env] = int(self.random.geometric(1.0 / self.scene.mean_length))

    def observation(self) -> np.ndarray:
        return np.stack([np.concatenate(list(stack), axis=0) for stack in self.stacks])

    def first(self) -> np.ndarray:
        for env in range(self.scene.num_envs):
            self._reset(env)
        return self.observation()

    def step(self) -> Timestep:
        envs = self.scene.num_envs
        action = self.random.integers(0, 18, envs)
        reward = self.random.standard_normal(envs).astype(np.float32)
        terminated, truncated, valid = (np.zeros(envs, np.bool_) for _ in range(3))
        for env in range(envs):
            if self.left[env] == 0 or self.random.random() < self.scene.crash_rate:
                reward[env] = 0.0
                self._reset(env)
                continue
            valid[env] = True
            self.stacks[env].append(self._frame())
            self.left[env] -= 1
            if self.left[env] == 0:
                kind = self.random.integers(0, 3)  # terminated, truncated, or both
                terminated[env], truncated[env] = kind != 1, kind != 0
        return Timestep(action, reward, terminated, truncated, valid, self.observation())

    def timesteps(self, count: int) -> Iterator[Timestep]:
        return (self.step() for _ in range(count))
