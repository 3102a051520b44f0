"""All parameters of a network, and their gradients, as views of two flat tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from typing_extensions import override

from steadyrl.agents.learner.comm import Comm
from steadyrl.agents.learner.statistics import Statistics
from steadyrl.core.saved_state import Limits
from steadyrl.core.state import Stateful

WEIGHT = Limits(-1e9, 1e9)  # beyond these a network has diverged


class FlatNetwork(Stateful):
    """A network whose parameters and gradients are views of two flat tensors.

    Updates of small networks are bound by kernel launches: one per layer and operation for
    separate parameters, one per operation for a flat tensor.
    """

    state_names = ("weights", "buffers")
    state_limits: ClassVar[Mapping[str, Limits]] = {"weights": WEIGHT}

    def __init__(self, module: nn.Module, device: torch.device, *, learns: bool = True) -> None:
        """Move a module to the device; one that does not learn has no gradient."""
        self.module = module.to(device)
        named = dict(module.named_parameters())
        self.shapes = {name: parameter.shape for name, parameter in named.items()}
        self.weights = torch.cat([p.detach().reshape(-1) for p in named.values()])
        self.gradient = torch.zeros_like(self.weights if learns else self.weights[:0])
        self.broadcasts = 0
        for name, view in self.views(self.weights).items():
            named[name].data = view
        if learns:
            for name, view in self.views(self.gradient).items():
                named[name].grad = view

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        for part in self.module.modules():
            if isinstance(part, Statistics):
                part.check_ranges()

    def views(self, weights: Tensor) -> dict[str, Tensor]:
        """Split flat `weights` [P] into the module's parameters, by name."""
        pieces = weights.split([shape.numel() for shape in self.shapes.values()])
        pairs = zip(self.shapes.items(), pieces, strict=True)
        return {name: piece.view(shape) for (name, shape), piece in pairs}

    def part(self, name: str) -> Tensor:
        """Return the weights [P] of a submodule, such as "critic"; not a copy."""
        inside = [each.startswith(f"{name}.") for each in self.shapes]
        if True not in inside:
            raise ValueError(f"{type(self.module).__name__} has no weights in {name!r}")
        pieces = self.weights.split([shape.numel() for shape in self.shapes.values()])
        begin = sum(piece.numel() for piece in pieces[: inside.index(True)])
        # A module's parameters are named one after the other, its own before its children's.
        size = sum(piece.numel() for piece, of_it in zip(pieces, inside, strict=True) if of_it)
        return self.weights[begin : begin + size]

    def attach_comm(self, comm: Comm) -> None:
        """Collective: take rank 0's weights and buffers.

        `broadcasts` counts this, because a collective does not increase a tensor's `_version`.
        """
        comm.broadcast_((self.weights, *self.module.buffers()))
        self.broadcasts += 1

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The module's buffers by name, such as running statistics."""
        return dict(self.module.named_buffers())

    def named(self) -> dict[str, Tensor]:
        """Return the current weights and buffers by their names in the module; not copies."""
        return self.views(self.weights) | self.buffers

    @property
    def nbytes(self) -> int:
        """Bytes of weights and gradient."""
        return self.weights.nbytes + self.gradient.nbytes

    def function(self, weights: Tensor) -> Callable[..., Any]:
        """Return the network with these weights [P] as a pure function of its inputs."""
        views = self.views(weights)
        return lambda *inputs: functional_call(self.module, views, inputs)
