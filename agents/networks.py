"""Networks by observation shape, an MLP or convolutions, and all weights of one in one tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor, nn
from torch.func import functional_call

from memory.state import Stateful

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
    if large:
        layers = nature_layers(channels)
    else:  # one convolution suits boards such as MinAtar's 10x10 (Young & Tian 2019)
        layers = [nn.Conv2d(channels, 16, (min(3, height), min(3, width))), nn.ReLU()]
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


class FlatNetwork(Stateful):
    """A network whose parameters, and their gradients, are views of two flat tensors.

    On small networks most of an update's time goes into starting kernels, one per layer and
    operation; on the flat tensors it is one per operation.
    """

    state_names = ("weights", "buffers")

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module = module.to(device)
        named = dict(module.named_parameters())
        self._shapes = {name: parameter.shape for name, parameter in named.items()}
        self.weights = torch.cat([p.detach().reshape(-1) for p in named.values()])
        self.gradient = torch.zeros_like(self.weights)
        weights, gradients = self.views(self.weights), self.views(self.gradient)
        for name, parameter in named.items():
            parameter.data, parameter.grad = weights[name], gradients[name]

    def views(self, weights: Tensor) -> dict[str, Tensor]:
        """Return `weights` [P] cut into the module's parameters."""
        pieces = weights.split([shape.numel() for shape in self._shapes.values()])
        pairs = zip(self._shapes.items(), pieces, strict=True)
        return {name: piece.view(shape) for (name, shape), piece in pairs}

    @property
    def buffers(self) -> dict[str, Tensor]:
        """What the module keeps besides its weights, such as running statistics."""
        return dict(self.module.named_buffers())

    def named(self) -> dict[str, Tensor]:
        """Return weights and buffers of this moment by the module's names."""
        return self.views(self.weights) | self.buffers

    @property
    def nbytes(self) -> int:
        """Bytes of weights and gradient."""
        return self.weights.nbytes + self.gradient.nbytes

    def function(self, weights: Tensor) -> Callable[..., Any]:
        """Return the network as a pure function of its inputs, with these weights [P]."""
        views = self.views(weights)
        return lambda *inputs: functional_call(self.module, views, inputs)


class QNetwork(nn.Module):
    """What a head says of every action, optionally split in two (dueling, Wang et al. 2016)."""

    def __init__(
        self,
        observation_shape: Sequence[int],
        dtype: str,
        actions: int,
        hidden: Sequence[int],
        dueling: bool,
        shape: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.trunk, features = build_trunk(observation_shape, dtype, hidden)
        size = math.prod(shape)
        self.advantage = nn.Linear(features, actions * size)
        self.value = nn.Linear(features, size) if dueling else None
        self.shape = shape  # of what is said of one action

    def forward(self, obs: Tensor) -> Tensor:
        """Return numbers [B, A, *shape] for observations [B, …]."""
        # As in Dense: what is called here is called several times an update.
        features = self.trunk.forward(obs)
        advantage = F.linear(features, self.advantage.weight, self.advantage.bias)
        if self.shape:
            advantage = advantage.view(len(obs), -1, *self.shape)
        if self.value is None:
            return advantage
        value = F.linear(features, self.value.weight, self.value.bias)
        if self.shape:
            value = value.view(len(obs), 1, *self.shape)
        return value + advantage - advantage.mean(1, keepdim=True)
