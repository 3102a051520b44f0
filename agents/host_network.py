"""Dense networks in NumPy.

For the few observations of one step, starting torch's kernels takes several times as long as the
arithmetic. The arrays share the weights' memory, so there is nothing to keep in step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from agents.actor_critic import ActorCritic, Tanh, TwinTrunk
from agents.heads import GaussianLayer
from agents.networks import Dense, QNetwork
from agents.normaliser import CLIP, ObservationNormaliser

Floats = NDArray[np.float32]
Layer = tuple[Floats, Floats]  # weights [in, out] and biases [out]


class HostNetwork:
    """Linear layers with an activation in place between them."""

    def __init__(self, layers: Sequence[Layer], activation: Callable[[Floats], object]) -> None:
        *self._hidden, self._last = layers
        self._activate = activation

    def __call__(self, x: NDArray[Any]) -> Floats:
        """Return the last layer's output [N, K] for inputs [N, D]."""
        for weight, bias in self._hidden:
            x = x @ weight
            x += bias
            self._activate(x)
        weight, bias = self._last
        y: Floats = x @ weight
        y += bias
        return y


class HostPolicy:
    """What parametrises the actions of an actor-critic network."""

    def __init__(self, network: ActorCritic) -> None:
        trunk, policy = network.trunk, network.policy
        assert isinstance(trunk, TwinTrunk)
        self._log_std: Floats | None = None
        if isinstance(policy, GaussianLayer):
            self._log_std = _array(policy.log_std)
            policy = policy.mean
        hidden = [(_array(layer.weight[0]), _array(layer.bias[0, 0])) for layer in trunk.twins]
        activation = _tanh if trunk.activation is Tanh else _relu
        self._network = HostNetwork([*hidden, _layer(policy)], activation)
        self._statistics = _statistics(network.normaliser)

    def __call__(self, obs: NDArray[Any]) -> Floats:
        """Return parameters [N, P] for observations [N, …]."""
        x = obs
        if self._statistics is not None:
            shift, scale = self._statistics
            x = np.subtract(x, shift, dtype=np.float32)
            x *= scale
            np.clip(x, -CLIP, CLIP, out=x)
        mean = self._network(x.reshape(len(x), -1))
        if self._log_std is None:
            return mean
        return np.concatenate((mean, np.broadcast_to(self._log_std, mean.shape)), axis=1)


def q_on_host(network: QNetwork) -> HostNetwork | None:
    """Return a network whose largest output is the best action, or None where there is none."""
    one_number = network.shape == ()
    if not (one_number and isinstance(network.trunk, Dense) and _on_host(network.advantage)):
        return None
    # The value of a dueling network is the same for all actions and cannot change the best.
    layers = [*network.trunk.layers, network.advantage]
    return HostNetwork([_layer(layer) for layer in layers], _relu)


def policy_on_host(network: ActorCritic) -> HostPolicy | None:
    """Return the policy in NumPy, or None where torch is as fast."""
    suits = isinstance(network.trunk, TwinTrunk) and _on_host(network.value)
    return HostPolicy(network) if suits else None


def _on_host(layer: nn.Module) -> bool:
    return all(weight.device.type == "cpu" for weight in layer.parameters())


def _statistics(normaliser: ObservationNormaliser | None) -> tuple[Floats, Floats] | None:
    return None if normaliser is None else (_array(normaliser.shift), _array(normaliser.scale))


def _layer(layer: nn.Module) -> Layer:
    assert isinstance(layer, nn.Linear)
    return _array(layer.weight).T, _array(layer.bias)


def _array(tensor: Tensor) -> Floats:
    array: Floats = tensor.detach().numpy()
    return array


def _relu(x: Floats) -> None:
    np.maximum(x, 0, out=x)


def _tanh(x: Floats) -> None:
    np.tanh(x, out=x)
