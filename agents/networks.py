"""Networks by observation shape: an MLP for vectors, convolutions for images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor, nn

# Below this side length the Nature layers' strides leave nothing of the image.
NATURE_MIN_SIDE = 36


def is_large_image(observation_shape: Sequence[int]) -> bool:
    """Say whether observations are images that the Nature layers take."""
    return len(observation_shape) == 3 and min(observation_shape[1:]) >= NATURE_MIN_SIDE


class Scale(nn.Module):
    """Bring uint8 pixels to [0, 1] on the device, so that a quarter of the bytes travel."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x / 255 as float32."""
        return x.to(torch.float32) * (1.0 / 255.0)


class PixelsTogether(nn.Module):
    """Put a pixel's channels side by side in memory, where the CPU's convolutions want them.

    Forward and backward through the Nature layers take a fifth to a third less time.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return x, laid out anew."""
        return x if x.is_cuda else x.contiguous(memory_format=torch.channels_last)


class Dense(nn.Module):
    """Linear layers with an activation after each, in one module.

    Calling a module costs as much as a small matrix product, so the layers are not called.
    """

    def __init__(self, features: int, hidden: Sequence[int], activation: type[nn.Module]) -> None:
        super().__init__()
        sizes = (features, *hidden)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self._activate = activation().forward

    def forward(self, x: Tensor) -> Tensor:
        """Return features [B, hidden[-1]]."""
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            x = self._activate(F.linear(x, layer.weight, layer.bias))
        return x


def nature_layers(channels: int) -> list[nn.Module]:
    """Return the three convolutions of Mnih et al. (2015)."""
    return [
        nn.Conv2d(channels, 32, 8, stride=4),
        nn.ReLU(),
        nn.Conv2d(32, 64, 4, stride=2),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, stride=1),
        nn.ReLU(),
    ]


def small_image_layers(channels: int, height: int, width: int) -> list[nn.Module]:
    """Return the one convolution that suits boards such as MinAtar's 10x10 (Young & Tian 2019)."""
    return [nn.Conv2d(channels, 16, (min(3, height), min(3, width))), nn.ReLU()]


def build_trunk(
    observation_shape: Sequence[int],
    dtype: str,
    hidden: Sequence[int],
    activation: type[nn.Module] = nn.ReLU,
) -> tuple[nn.Module, int]:
    """Build the layers up to the heads; return them with the number of features they end in."""
    if len(observation_shape) != 3:
        features = math.prod(observation_shape)
        dense = Dense(features, hidden, activation)
        flat = len(observation_shape) == 1
        return dense if flat else nn.Sequential(nn.Flatten(), dense), hidden[-1]
    channels, height, width = observation_shape
    large = is_large_image(observation_shape)
    layers = nature_layers(channels) if large else small_image_layers(channels, height, width)
    layers.append(nn.Flatten())
    with torch.no_grad():
        features = nn.Sequential(*layers)(torch.zeros(1, channels, height, width)).numel()
    if dtype == "uint8":
        layers.insert(0, Scale())
    if large:
        layers.insert(0, PixelsTogether())
    return nn.Sequential(*layers, Dense(features, hidden, activation)), hidden[-1]


def uniform_(module: nn.Module, generator: torch.Generator) -> None:
    """Initialise every layer as U(−1/√fan_in, 1/√fan_in), PyTorch's default, from our generator."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            bound = 1 / math.sqrt(layer.weight[0].numel())
            for parameter in layer.parameters():
                nn.init.uniform_(parameter, -bound, bound, generator=generator)


def orthogonal_(module: nn.Module, gain: float, generator: torch.Generator) -> None:
    """Initialise every layer of `module` orthogonally with zero biases (Saxe et al. 2014)."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.orthogonal_(layer.weight, gain, generator=generator)
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)


class QNetwork(nn.Module):
    """Q-values for every action, optionally split into value and advantage (Wang et al. 2016)."""

    def __init__(
        self,
        observation_shape: Sequence[int],
        dtype: str,
        actions: int,
        hidden: Sequence[int],
        dueling: bool,
    ) -> None:
        super().__init__()
        self.trunk, features = build_trunk(observation_shape, dtype, hidden)
        self.advantage = nn.Linear(features, actions)
        self.value = nn.Linear(features, 1) if dueling else None

    def forward(self, obs: Tensor) -> Tensor:
        """Return Q [B, A] for observations [B, …]."""
        # As in Dense: what is called here is called several times an update.
        features = self.trunk.forward(obs)
        advantage = F.linear(features, self.advantage.weight, self.advantage.bias)
        if self.value is None:
            return advantage
        value = F.linear(features, self.value.weight, self.value.bias)
        return value + advantage - advantage.mean(1, keepdim=True)
