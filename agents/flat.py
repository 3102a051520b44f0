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
        parameters = list(module.parameters())
        self.weights = torch.cat([p.detach().reshape(-1) for p in parameters])
        self.gradient = torch.zeros_like(self.weights)
        self._slices: dict[str, tuple[int, int, torch.Size]] = {}
        offset = 0
        for name, parameter in module.named_parameters():
            end = offset + parameter.numel()
            self._slices[name] = (offset, end, parameter.shape)
            parameter.data = self.weights[offset:end].view(parameter.shape)
            parameter.grad = self.gradient[offset:end].view(parameter.shape)
            offset = end

    def views(self, weights: Tensor) -> dict[str, Tensor]:
        """Return `weights` [P] cut into the module's parameters."""
        return {name: weights[a:b].view(shape) for name, (a, b, shape) in self._slices.items()}

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
