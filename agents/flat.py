"""All weights of a network in one tensor: one clip, one Adam, one copy instead of one per layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call


class FlatNetwork:
    """A network whose parameters, and their gradients, are views of two flat tensors.

    On small networks most of an update's time goes into starting kernels, one per layer and
    operation; on the flat tensors it is one per operation.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module = module.to(device)
        named = dict(module.named_parameters())
        self._names = list(named)
        self._shapes = [p.shape for p in named.values()]
        self._sizes = [p.numel() for p in named.values()]
        self.weights = torch.cat([p.detach().reshape(-1) for p in named.values()])
        self.gradient = torch.zeros_like(self.weights)
        pairs = zip(
            self.views(self.weights).values(), self.views(self.gradient).values(), strict=True
        )
        for parameter, (weight, gradient) in zip(named.values(), pairs, strict=True):
            parameter.data = weight
            parameter.grad = gradient

    def views(self, weights: Tensor) -> dict[str, Tensor]:
        """Return `weights` [P] cut into the module's parameters."""
        pieces = weights.split(self._sizes)
        return {
            name: piece.view(shape)
            for name, piece, shape in zip(self._names, pieces, self._shapes, strict=True)
        }

    def function(self, weights: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the network as a pure function of its input, with these weights [P]."""
        views = self.views(weights)
        return lambda x: functional_call(self.module, views, (x,))

    def load(self, weights: Tensor) -> None:
        """Copy `weights` [P] in."""
        if weights.shape != self.weights.shape:
            raise ValueError(
                f"the network has {self.weights.numel()} weights, the state {weights.numel()}"
            )
        self.weights.copy_(weights)
