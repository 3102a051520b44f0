"""The Q-network: encoder, optional dueling streams, and one output per action."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from steadyrl.agents.networks.action_mask import Masks
from steadyrl.agents.networks.encoders import apply_linear, build_trunk
from steadyrl.agents.networks.hidden import matrices_after_first
from steadyrl.agents.networks.init import orthogonal_, uniform_
from steadyrl.agents.networks.noisy import noise_sizes
from steadyrl.agents.networks.settings import PLAIN, Init, NetworkSettings

if TYPE_CHECKING:
    from steadyrl.agents.networks.encoders import Linear


class QNetwork(nn.Module):
    """Outputs of a Q-head for every action, optionally dueling (Wang et al. 2016)."""

    def __init__(
        self,
        observation_shape: Sequence[int],
        dtype: str,
        actions: int,
        hidden: Sequence[int],
        dueling: bool,
        shape: tuple[int, ...] = (),
        *,
        network: NetworkSettings = PLAIN,
        linear: Linear = nn.Linear,
        masks: Masks | None = None,
    ) -> None:
        super().__init__()
        self.observation_shape = tuple(observation_shape)
        self.masks = masks  # split from the observation first
        self.trunk, features = self.build_trunk(observation_shape, dtype, hidden, network, linear)
        size = math.prod(shape)
        self.advantage = linear(features, actions * size)
        self.value = linear(features, size) if dueling else None
        self.shape = shape  # of one action's output
        self._noise_sizes = noise_sizes(self)

    def build_trunk(
        self,
        observation_shape: Sequence[int],
        dtype: str,
        hidden: Sequence[int],
        network: NetworkSettings,
        linear: Linear,
    ) -> tuple[nn.Module, int]:
        """Build the layers before streams and outputs; return them and their number of features.

        A subclass may have its own: the last one of a Sequence is an `MLP`, which takes the noise.
        """
        return build_trunk(observation_shape, dtype, hidden, network, linear)

    @property
    def noise_size(self) -> int:
        """Length of the noise vector that a forward pass takes; 0: none."""
        return sum(self._noise_sizes)

    @property
    def is_noisy(self) -> bool:
        """Whether it has noisy layers, by which it explores."""
        return bool(self._noise_sizes)

    def hidden_matrices(self) -> dict[str, int]:
        """Return the names of weights between hidden layers, with the matrices in each."""
        return matrices_after_first(self, "trunk")

    def reset_parameters(self, generator: torch.Generator, init: Init = "auto") -> None:
        """Initialise uniformly, or orthogonally with gains √2 in the trunk and 1 in the heads."""
        if init != "orthogonal":
            uniform_(self, generator)
            return
        orthogonal_(self.trunk, math.sqrt(2), generator)
        for head in (self.advantage, self.value):
            if head is not None:
                orthogonal_(head, 1.0, generator)

    def forward(self, obs: Tensor, noise: Tensor | None = None) -> Tensor:
        """Return outputs [B, A, *shape] for observations [B, …].

        `noise` [K] or [B, K] is for the noisy layers; None uses their mean weights.
        """
        # `shape[0]`, not `len`, which a trace (ONNX export) takes for a constant.
        # Layers' `forward` is called directly, as in MLP: `__call__` costs time in every update.
        parts = None if noise is None else iter(noise.split(self._noise_sizes, -1))
        features = self._features(obs if self.masks is None else self.masks.features(obs), parts)
        advantage = apply_linear(self.advantage, features, parts)
        if self.shape:
            advantage = advantage.view(obs.shape[0], -1, *self.shape)
        if self.value is None:
            return advantage
        value = apply_linear(self.value, features, parts)
        if self.shape:
            value = value.view(obs.shape[0], 1, *self.shape)
        return value + advantage - advantage.mean(1, keepdim=True)

    def _features(self, obs: Tensor, noise: Iterator[Tensor] | None) -> Tensor:
        if noise is None:
            return self.trunk.forward(obs)  # type: ignore[no-any-return]
        *before, dense = self.trunk if isinstance(self.trunk, nn.Sequential) else (self.trunk,)
        for layer in before:
            obs = layer.forward(obs)
        return dense.forward(obs, noise)  # type: ignore[no-any-return]
