"""Action masks, which are bits behind the features of an observation (`envs/encoding/masks.py`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steadyrl.envs.types import MASK_BITS, DiscreteActions, EnvSpec

# Q-value or logit of a forbidden action: its probability is exactly 0, and being finite, 0 · it
# is 0 too.
FORBIDDEN = -1e30
UNIFORM_INT_MAX = 1 << 62  # range of the random integers: their remainders are uniform


class Masks:
    """Split observations [B, …] into features and action masks.

    B is `shape[0]`, not `len`, which a trace (ONNX export) takes for a constant.
    """

    def __init__(self, spec: EnvSpec, actions: int, device: torch.device) -> None:
        self._actions, self._mask = actions, spec.mask
        self._vectors = spec.frame_stack if len(spec.frame_shape) == 1 else 0
        self._size = spec.frame_shape[0]  # of a vector, or in channels
        self._newest = 1 if self._vectors else self._size
        bits = range(MASK_BITS[spec.dtype])
        self._powers = torch.tensor([0.5**bit for bit in bits], device=device)

    @classmethod
    def of(cls, spec: EnvSpec, device: torch.device) -> Masks | None:
        """Return the masks of an environment, or None if it has none."""
        if not spec.mask:
            return None
        assert isinstance(spec.action, DiscreteActions)
        return cls(spec, spec.action.n, device)

    def _frames(self, obs: Tensor) -> Tensor:
        """Return frames [B, K, …] with the mask at the end of axis 2; for images K are channels."""
        return obs.reshape(obs.shape[0], self._vectors, self._size) if self._vectors else obs

    def features(self, obs: Tensor) -> Tensor:
        """Return observations [B, …] without their masks."""
        features = self._frames(obs)[:, :, : -self._mask]
        return features.flatten(1) if self._vectors else features

    def replace_features(self, features: Tensor, obs: Tensor) -> Tensor:
        """Return observations [B, …] with other features and the masks of `obs`."""
        masks = self._frames(obs)[:, :, -self._mask :]
        if self._vectors:
            features = features.reshape(features.shape[0], self._vectors, self._size - self._mask)
        return torch.cat((features, masks), 2).view_as(obs)

    def allowed(self, obs: Tensor) -> Tensor:
        """Return which actions are allowed [B, A], from the newest frame."""
        numbers = self._frames(obs)[:, -self._newest :, -self._mask :].flatten(1)
        bits = torch.floor(numbers.unsqueeze(-1) * self._powers).remainder(2)
        return bits.flatten(1)[:, : self._actions].bool()

    def forbid(self, values: Tensor, obs: Tensor) -> Tensor:
        """Return Q-values or logits [B, A] with `FORBIDDEN` for actions that are not allowed."""
        return torch.where(self.allowed(obs), values, FORBIDDEN)

    def sample_allowed(self, numbers: NDArray[np.int64], obs: NDArray[Any]) -> NDArray[np.int64]:
        """Return an allowed action [N], uniform if `numbers` [N] are in [0, UNIFORM_INT_MAX)."""
        cumulative_allowed = self.allowed(torch.from_numpy(obs)).numpy().cumsum(1)
        actions: NDArray[np.int64] = (
            cumulative_allowed > (numbers % cumulative_allowed[:, -1])[:, None]
        ).argmax(1)
        return actions
