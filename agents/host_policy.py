"""Greedy actions of a dense network in NumPy.

For the few observations of one step, starting torch's kernels takes several times as long as the
arithmetic. The arrays share the weights' memory, so there is nothing to keep in step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from agents.networks import Dense, QNetwork


class HostPolicy:
    """The best action for each observation, by the current weights of a network on the host."""

    def __init__(self, network: QNetwork) -> None:
        assert suits(network)
        # The value of a dueling network is the same for all actions and cannot change the best.
        layers = [*network.trunk.layers, network.advantage]  # type: ignore[union-attr,misc]
        self._layers = [_arrays(layer) for layer in layers]

    def __call__(self, obs: NDArray[Any]) -> NDArray[np.int64]:
        """Return actions [N] for observations [N, D]."""
        x = obs
        *hidden, last = self._layers
        for weight, bias in hidden:
            x = x @ weight
            x += bias
            np.maximum(x, 0, out=x)
        weight, bias = last
        best: NDArray[np.int64] = (x @ weight + bias).argmax(1)
        return best


def suits(network: QNetwork) -> bool:
    """Say whether a network is dense and in host memory."""
    return isinstance(network.trunk, Dense) and network.advantage.weight.device.type == "cpu"


def _arrays(layer: nn.Linear) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    return layer.weight.detach().numpy().T, layer.bias.detach().numpy()
