"""A policy as one torch module whose actions the environment takes: what an ONNX file holds."""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from steadyrl.envs.encoding.spaces import clip_bounds


class EnvPolicy(nn.Module):
    """Encoded observations [N, …] in, actions [N, …] of the environment's action space out.

    `policy` returns what the agent chooses, which `Decoder.decode` turns into actions for the
    environments; this is the same in torch, where a graph is exported.
    """

    low: Tensor
    high: Tensor
    start: Tensor

    def __init__(self, policy: nn.Module, space: spaces.Space[object]) -> None:
        super().__init__()
        assert space.shape is not None
        self.policy, self._shape, self._is_box = policy, space.shape, isinstance(space, spaces.Box)
        if isinstance(space, spaces.Box):
            for name, bound in zip(("low", "high"), clip_bounds(space), strict=True):
                self.register_buffer(name, torch.from_numpy(bound))
        start = space.start if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) else 0
        self.register_buffer("start", torch.from_numpy(np.array(start, np.int64)))
        dtype = np.dtype(space.dtype)
        # ONNX's exporter knows no wider unsigned integers than bytes.
        dtype = np.dtype(np.int64) if dtype.kind == "u" and dtype.itemsize > 1 else dtype
        self._dtype = torch.from_numpy(np.zeros(1, dtype)).dtype

    def forward(self, obs: Tensor) -> Tensor:
        """Return the environment's actions for encoded observations."""
        actions: Tensor = self.policy(obs).reshape(-1, *self._shape)
        if not self._is_box:
            return (actions + self.start).to(self._dtype)
        actions = torch.maximum(torch.minimum(actions.to(self.low.dtype), self.high), self.low)
        exact = actions if self._dtype.is_floating_point else actions.round()
        return exact.to(self._dtype)
