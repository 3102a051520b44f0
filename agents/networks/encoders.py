"""Layers up to the heads: the convolutions that `agent.network.encoder` chooses, and the MLP."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from steadyrl.agents.networks.activations import ACTIVATIONS
from steadyrl.agents.networks.noisy import NoisyLinear
from steadyrl.agents.networks.settings import (
    Activation,
    EncoderName,
    NetworkSettings,
    is_large_image,
)

Linear = Callable[[int, int], nn.Linear]  # (inputs, outputs) → layer


class PixelScale(nn.Module):
    """Scale uint8 pixels to [0, 1] on the device, where they arrive as bytes."""

    def __init__(self, *, channels_last: bool) -> None:
        super().__init__()
        self._channels_last = channels_last  # the memory format that convolutions prefer

    def forward(self, x: Tensor) -> Tensor:
        """Return x / 255 as float32."""
        return (channels_last(x) if self._channels_last else x).to(torch.float32) * (1.0 / 255.0)


class ChannelsLast(nn.Module):
    """`channels_last` as a layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x in channels-last memory format."""
        return channels_last(x)


def channels_last(x: Tensor) -> Tensor:
    """Return x in channels-last memory format, which convolutions on the CPU prefer.

    Forward and backward passes of the Nature CNN take 20–33 % less time, those of a compiled
    MinAtar network 5 %.
    """
    return x.contiguous(memory_format=torch.channels_last) if x.device.type == "cpu" else x


def apply_linear(layer: nn.Linear, x: Tensor, noise: Iterator[Tensor] | None) -> Tensor:
    """Apply a layer to x; a noisy layer takes the next part of `noise`."""
    if noise is not None and isinstance(layer, NoisyLinear):
        return layer.forward(x, next(noise))
    return F.linear(x, layer.weight, layer.bias)


class MLP(nn.Module):
    """Linear layers with activations and optional layer norms, in one module.

    Calling a submodule costs as much as a small matrix product, so layers are not called.
    """

    def __init__(
        self,
        features: int,
        hidden: Sequence[int],
        activation: Activation = "relu",
        *,
        layer_norm: bool = False,
        linear: Linear = nn.Linear,
    ) -> None:
        super().__init__()
        sizes = (features, *hidden)
        self.layers = nn.ModuleList(linear(a, b) for a, b in pairwise(sizes))
        self.norms = nn.ModuleList(nn.LayerNorm(size) for size in hidden) if layer_norm else None
        self.activation: Activation = activation
        self._activate = ACTIVATIONS[activation]

    def forward(self, x: Tensor, noise: Iterator[Tensor] | None = None) -> Tensor:
        """Return features [B, hidden[-1]]; `noise` yields one part per noisy layer."""
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, nn.Linear)
            x = apply_linear(layer, x, noise)
            if self.norms is not None:
                x = self.norms[index].forward(x)
            x = self._activate(x)
        return x


class Residual(nn.Module):
    """A residual block: two convolutions, each after a ReLU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return x + f(x) [B, C, H, W]."""
        y: Tensor = self.second(F.relu(self.first(F.relu(x))))
        return x + y


def nature_layers(channels: int, height: int, width: int) -> list[nn.Module]:
    """Return the three convolutions of Mnih et al. (2015)."""
    del height, width
    return [
        nn.Conv2d(channels, 32, 8, stride=4),
        nn.ReLU(),
        nn.Conv2d(32, 64, 4, stride=2),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, stride=1),
        nn.ReLU(),
    ]


def impala_layers(channels: int, height: int, width: int) -> list[nn.Module]:
    """Return the fifteen convolutions of Espeholt et al. (2018), figure 3, right."""
    del height, width
    layers: list[nn.Module] = []
    for wider in (16, 32, 32):
        layers += [
            nn.Conv2d(channels, wider, 3, padding=1),
            nn.MaxPool2d(3, stride=2, padding=1),
            Residual(wider),
            Residual(wider),
        ]
        channels = wider
    return [*layers, nn.ReLU()]


def der_layers(channels: int, height: int, width: int) -> list[nn.Module]:
    """Return the two convolutions of data-efficient Rainbow (van Hasselt et al. 2019)."""
    del height, width
    return [
        nn.Conv2d(channels, 32, 5, stride=5),
        nn.ReLU(),
        nn.Conv2d(32, 64, 5, stride=5),
        nn.ReLU(),
    ]


def minatar_layers(channels: int, height: int, width: int) -> list[nn.Module]:
    """Return the one convolution of Young & Tian (2019), for 10x10 boards."""
    return [nn.Conv2d(channels, 16, (min(3, height), min(3, width))), nn.ReLU()]


CONVOLUTIONS = {
    "nature": nature_layers,
    "impala": impala_layers,
    "minatar": minatar_layers,
    "der": der_layers,
}


def build_trunk(
    observation_shape: Sequence[int],
    dtype: str,
    hidden: Sequence[int],
    network: NetworkSettings,
    linear: Linear = nn.Linear,
) -> tuple[nn.Module, int]:
    """Build the layers up to the heads; return them and their number of features.

    `linear` builds the linear layers.
    """
    encoder = network.encoder_for(observation_shape)
    layers = _before_mlp(encoder, observation_shape)
    features = math.prod(observation_shape)
    if encoder != "mlp":
        features = _feature_count(layers, observation_shape)
    if dtype == "uint8" and len(observation_shape) == 3:
        layers.insert(0, PixelScale(channels_last=encoder != "mlp"))
    if encoder != "mlp" and is_large_image(observation_shape):
        layers.insert(0, ChannelsLast())
    mlp = MLP(features, hidden, network.activation, layer_norm=network.layer_norm, linear=linear)
    return nn.Sequential(*layers, mlp) if layers else mlp, hidden[-1]


def _feature_count(layers: Sequence[nn.Module], observation_shape: Sequence[int]) -> int:
    """Return how many features the encoder's layers have for an observation.

    Computed, because a forward pass on the meta device would import torch's compiler (1 s). Layers
    other than `Conv2d` and `MaxPool2d` are taken to keep the shape.
    """
    channels, *sides = observation_shape
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            channels = layer.out_channels
            assert isinstance(layer.padding, tuple)
            steps = [*zip(layer.kernel_size, layer.stride, layer.padding, strict=True)]
        elif isinstance(layer, nn.MaxPool2d):
            steps = [(layer.kernel_size, layer.stride, layer.padding)] * 2  # type: ignore[list-item]
        else:  # keeps the shape
            continue
        pairs = zip(sides, steps, strict=True)
        sides = [(side + 2 * margin - size) // step + 1 for side, (size, step, margin) in pairs]
    return channels * math.prod(sides)


def _before_mlp(encoder: EncoderName, observation_shape: Sequence[int]) -> list[nn.Module]:
    if encoder == "mlp":
        return [] if len(observation_shape) == 1 else [nn.Flatten()]
    return [*CONVOLUTIONS[encoder](*observation_shape), nn.Flatten()]
