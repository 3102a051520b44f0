"""Running statistics of what the agent sees and earns, over valid rows only.

Both are frozen while a rollout is collected and learned from, so that a row means the same when
it is acted on and when it is learned from; they move on between rollouts.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

CLIP = 10.0  # normalised observations and rewards stay within ±10 standard deviations
EPSILON = 1e-8


class ObservationNormaliser(nn.Module):
    """The first layer of the network: (x − mean) / std, clipped; the identity at first."""

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
        for buffer in (self.count, self.mean, self.square, self.shift):
            buffer.zero_()
        self.scale.fill_(1)

    def forward(self, obs: Tensor) -> Tensor:
        """Return normalised observations [B, …]."""
        return ((obs - self.shift) * self.scale).clamp(-CLIP, CLIP)

    @torch.no_grad()
    def update(self, obs: Tensor) -> None:
        """Take in rows [B, …] (Chan et al. 1979, in float64)."""
        x = obs.double()
        count = len(x)
        mean = x.mean(0)
        total = self.count + count
        delta = mean - self.mean
        self.square += (x - mean).square().sum(0) + delta.square() * (self.count * count / total)
        self.mean += delta * (count / total)
        self.count.copy_(total)
        std = (self.square / total).sqrt()
        self.shift.copy_(self.mean)
        # An input that never moved carries nothing, but must not be blown up once it does.
        self.scale.copy_(torch.where(std > EPSILON, 1 / std, torch.ones_like(std)))


class RewardNormaliser:
    """Divides rewards by the standard deviation of the discounted return, never shifts them."""

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

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics and the returns under way."""
        return {
            "return": torch.from_numpy(self._return.copy()),
            "count": self._count,
            "mean": self._mean,
            "square": self._square,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._return = state["return"].numpy().copy()
        self._count = state["count"]
        self._mean = state["mean"]
        self._square = state["square"]
