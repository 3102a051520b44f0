"""Shapes and sizes of a replay, known before a byte of it is allocated."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


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
    def row_bytes(self) -> int:
        """Bytes per slot for a home's share: frame, action and reward."""
        return self.frame_size * np.dtype(self.dtype).itemsize + 8 + 4

    def to_plain(self) -> dict[str, Any]:
        """Return what a saved replay must agree on, as plain values."""
        return {**asdict(self), "frame_shape": list(self.frame_shape)}
