"""How networks start, all weights of one in one tensor, and the one of values of actions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from agents.masking import Masks
from agents.network_settings import PLAIN, Activation, Init, NetworkSettings
from agents.noisy import NoisyLinear, noise_sizes
from agents.trunks import Linear, build_trunk, linearly
from memory.state import Stateful

Network = TypeVar("Network", bound=nn.Module)


def uniform_(module: nn.Module, generator: torch.Generator) -> None:
    """Initialise every layer as U(−1/√fan_in, 1/√fan_in), PyTorch's default, from our generator."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            bound = 1 / math.sqrt(layer.weight[0].numel())
            for parameter in layer.parameters():
                nn.init.uniform_(parameter, -bound, bound, generator=generator)
            if isinstance(layer, NoisyLinear):
                layer.start_()
        elif isinstance(layer, nn.LayerNorm):
            layer.reset_parameters()  # to 1 and 0


def orthogonal_(module: nn.Module, gain: float, generator: torch.Generator) -> None:
    """Initialise every layer of `module` orthogonally with zero biases (Saxe et al. 2014)."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.orthogonal_(layer.weight, gain, generator=generator)
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
            if isinstance(layer, NoisyLinear):
                layer.start_()
        elif isinstance(layer, nn.LayerNorm):
            layer.reset_parameters()  # to 1 and 0


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
        *,
        activation: Activation = "relu",
        network: NetworkSettings = PLAIN,
        linear: Linear = nn.Linear,
        masks: Masks | None = None,
    ) -> None:
        super().__init__()
        self.masks = masks  # of what is shown besides `observation_shape`
        self.trunk, features = build_trunk(
            observation_shape, dtype, hidden, activation, network, linear
        )
        size = math.prod(shape)
        self.advantage = linear(features, actions * size)
        self.value = linear(features, size) if dueling else None
        self.shape = shape  # of what is said of one action
        self._noise_sizes = noise_sizes(self)

    @property
    def noise_size(self) -> int:
        """Numbers that one draw of all noisy weights takes."""
        return sum(self._noise_sizes)

    def start_(self, generator: torch.Generator, init: Init = "auto") -> None:
        """Initialise uniformly, or orthogonally with gain √2 in the trunk and 1 after it."""
        if init != "orthogonal":
            uniform_(self, generator)
            return
        orthogonal_(self.trunk, math.sqrt(2), generator)
        for head in (self.advantage, self.value):
            if head is not None:
                orthogonal_(head, 1.0, generator)

    def forward(self, obs: Tensor, noise: Tensor | None = None) -> Tensor:
        """Return numbers [B, A, *shape] for observations [B, …].

        `noise` is [K] of noisy layers, or [B, K]; without it they are as their means are.
        """
        # As in Dense: what is called here is called several times an update.
        parts = None if noise is None else iter(noise.split(self._noise_sizes, -1))
        features = self._features(obs if self.masks is None else self.masks.seen(obs), parts)
        advantage = linearly(self.advantage, features, parts)
        if self.shape:
            advantage = advantage.view(len(obs), -1, *self.shape)
        if self.value is None:
            return advantage
        value = linearly(self.value, features, parts)
        if self.shape:
            value = value.view(len(obs), 1, *self.shape)
        return value + advantage - advantage.mean(1, keepdim=True)

    def _features(self, obs: Tensor, noise: Iterator[Tensor] | None) -> Tensor:
        if noise is None:
            return self.trunk.forward(obs)  # type: ignore[no-any-return]
        *before, dense = self.trunk if isinstance(self.trunk, nn.Sequential) else (self.trunk,)
        for layer in before:
            obs = layer.forward(obs)
        return dense.forward(obs, noise)  # type: ignore[no-any-return]


def with_memory(module: Network, device: torch.device) -> Network:
    """Give a network that was built without memory its tensors, which hold anything.

    `Module.to_empty` does the same, and loads 35 MB of symbolic mathematics for it.
    """
    for part in module.modules():
        for name, weight in list(part.named_parameters(recurse=False)):
            empty = torch.empty(weight.shape, dtype=weight.dtype, device=device)
            setattr(part, name, nn.Parameter(empty, weight.requires_grad))
        for name, buffer in list(part.named_buffers(recurse=False)):
            setattr(part, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))
    return module
