"""Running statistics of what the agent sees and earns, over valid rows only.

A row must mean the same when it is acted on and when it is learned from. So both are frozen while
a rollout is collected and learned from, and move on between rollouts. Only during the first one,
before which nothing is known, those of observations move from row to row: its rows are then
stored as they were seen, normalised already (`look`, `update`), and learned from as they are
(`rest_`, `settle_`).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from memory.state import Stateful

CLIP = 10.0  # normalised observations and rewards stay within ±10 standard deviations
EPSILON = 1e-8


class ObservationNormaliser(nn.Module):
    """The first layer of the network: (x − mean) / std, clipped; the identity before any row."""

    count: Tensor
    mean: Tensor
    square: Tensor
    shift: Tensor
    scale: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("count", torch.empty((), dtype=torch.float64))
        self.register_buffer("mean", torch.empty(shape, dtype=torch.float64))
        self.register_buffer("square", torch.empty(shape, dtype=torch.float64))
        self.register_buffer("shift", torch.empty(shape))
        self.register_buffer("scale", torch.empty(shape))
        self.start_()

    def start_(self) -> None:
        """Forget all rows."""
        for buffer in self._statistics():
            buffer.zero_()
        self.rest_()

    def forward(self, obs: Tensor) -> Tensor:
        """Return normalised observations [B, …]."""
        return ((obs - self.shift) * self.scale).clamp(-CLIP, CLIP)

    @torch.no_grad()
    def look(self, obs: Tensor) -> None:
        """Normalise as if rows [B, …] had been taken in, without taking them in."""
        self._use(*self._with(obs))

    @torch.no_grad()
    def update(self, obs: Tensor) -> None:
        """Take in rows [B, …]."""
        if len(obs):
            for mine, new in zip(self._statistics(), self._with(obs), strict=True):
                mine.copy_(new)
        self.settle_()

    def rest_(self) -> None:
        """Be the identity, for rows that are normalised already."""
        self.shift.zero_()
        self.scale.fill_(1)

    def settle_(self) -> None:
        """Normalise by the rows taken in so far; the identity where there is none."""
        self._use(*self._statistics())

    def _statistics(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.count, self.mean, self.square

    def _with(self, obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return count, mean and Σ(x − mean)² with these rows (Chan et al. 1979, in float64)."""
        x = obs.double()
        mean = x.mean(0)
        delta = mean - self.mean
        total = self.count + len(x)
        share = len(x) / total
        square = (x - mean).square().sum(0) + delta.square() * (self.count * share)
        return total, self.mean + delta * share, self.square + square

    def _use(self, count: Tensor, mean: Tensor, square: Tensor) -> None:
        std = (square / count.clamp(min=1)).sqrt()
        self.shift.copy_(mean)
        # An input that never moved carries nothing, but must not be blown up once it does.
        self.scale.copy_(torch.where(std > EPSILON, 1 / std, torch.ones_like(std)))


class RewardNormaliser(Stateful):
    """Divides rewards by the standard deviation of the discounted return, never shifts them."""

    state_names = ("_return", "_count", "_mean", "_square")

    def __init__(self, num_envs: int, gamma: float) -> None:
        self._gamma = gamma
        self._return: NDArray[np.float64] = np.zeros(num_envs)
        self._count = 0
        self._mean = 0.0
        self._square = 0.0

    def add(self, reward: NDArray[np.float32], valid: NDArray[np.bool_]) -> None:
        """Take in one row: G ← γG + r where valid, 0 where an environment resets."""
        self._return = (self._return * self._gamma + reward) * valid
        count = int(np.count_nonzero(valid))
        if not count:
            return
        mean = float(self._return.sum()) / count
        deviation = (self._return - mean) * valid
        total = self._count + count
        delta = mean - self._mean
        self._square += float(deviation @ deviation) + delta**2 * self._count * count / total
        self._mean += delta * count / total
        self._count = total

    @property
    def scale(self) -> float:
        """What rewards are multiplied by; 1 until there is a spread."""
        std = math.sqrt(self._square / self._count) if self._count else 0.0
        return 1 / std if std > EPSILON else 1.0
