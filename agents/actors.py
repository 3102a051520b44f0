"""Those who decide: ε-greedily, by sampling, or greedily, by the weights of this moment.

Each reads a network that somebody else may be changing, and owns what it draws with. For the few
observations of one step, starting torch's kernels takes several times as long as the arithmetic:
small dense networks act in NumPy. The arrays share the weights' memory, so there is nothing to keep
in step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agents.activations import ACTIVATIONS, Floats
from agents.actor_critic import ActorCritic, TwinLayer, TwinTrunk
from agents.base import Actor, Decision
from agents.heads import GaussianLayer, Head
from agents.network_settings import Activation
from agents.networks import QNetwork
from agents.normaliser import CLIP
from agents.trunks import Dense

Observations = NDArray[Any]  # [N, …]
NORM_EPSILON = 1e-5  # torch's own


def on_device(obs: Observations, device: torch.device) -> Tensor:
    """Return observations where the network is."""
    tensor = torch.from_numpy(obs)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


class Greedy(Actor):
    """Takes the best action, by what the network puts out; draws nothing and changes nothing.

    The outputs come from `on_host` where there is one, because for few observations NumPy is
    faster, else from the network on its device.
    """

    def __init__(
        self,
        network: Callable[[Tensor], Tensor],
        on_host: Callable[[Observations], Floats] | None,
        device: torch.device,
        choose: Callable[[Tensor], Tensor],
    ) -> None:
        self._network, self._on_host, self.device = network, on_host, device
        self._choose = choose  # actions [N, …] by outputs [N, …]

    def act(self, obs: Observations, starts: NDArray[np.bool_]) -> Decision:
        """Decide for observations [N, …]."""
        observed = on_device(obs, self.device)
        if self._on_host is not None:
            return Decision(observed, self._choose(torch.from_numpy(self._on_host(obs))))
        with torch.inference_mode():
            return Decision(observed, self.decide(observed))

    def decide(self, observed: Tensor) -> Tensor:
        """Return the best actions [N, …] for observations [N, …] on the network's device."""
        return self._choose(self._network(observed))


def most_likely(network: ActorCritic, head: Head, device: torch.device) -> Actor:
    """Return an actor that takes the most likely actions."""
    on_host = policy_on_host(network)
    return Greedy(network.deciding, on_host, device, lambda p: head.sent(head.greedy(p)))


class EpsilonGreedy(Actor):
    """Takes a random action with probability ε, one coin per environment, else the best one."""

    state_names = ("_generator",)

    def __init__(
        self, greedy: Greedy, *, actions: int, epsilon: Callable[[], float], seed: int
    ) -> None:
        self._greedy = greedy
        self._actions, self._epsilon = actions, epsilon
        self._generator = np.random.Generator(np.random.PCG64(seed))

    def act(self, obs: Observations, starts: NDArray[np.bool_]) -> Decision:
        """Decide for observations [N, …]."""
        random = self._generator.random(len(obs)) < self._epsilon()
        if not random.any():
            return self._greedy.act(obs, starts)
        chosen = self._generator.integers(self._actions, size=len(obs))
        if random.all():
            return Decision(on_device(obs, self._greedy.device), torch.from_numpy(chosen))
        best = self._greedy.act(obs, starts)
        chosen = np.where(random, chosen, best.action.numpy(force=True))
        return best._replace(action=torch.from_numpy(chosen))


class Sampling(Actor):
    """Draws actions from the policy, with noise drawn for all rows of a rollout at once.

    On a device one forward pass gives action, log-probability and value: it is `complete`. In
    NumPy it gives the action alone, and the rest follows for all rows at once. While the network
    is `fresh`, what is acted on counts in its statistics of observations.
    """

    state_names = ("_generator", "_noise", "_next")

    def __init__(
        self,
        network: ActorCritic,
        head: Head,
        on_host: HostPolicy | None,
        *,
        rows: int,
        num_envs: int,
        device: torch.device,
        seed: int,
        fresh: Callable[[], bool],
    ) -> None:
        self.complete = on_host is None
        self._network, self._head, self._on_host = network, head, on_host
        self._device, self._fresh = device, fresh
        self._generator = torch.Generator(device).manual_seed(seed)
        self._noise = torch.zeros((rows, num_envs, *head.noise_shape), device=device)
        self._next = 0

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._noise.nbytes

    def act(self, obs: Observations, starts: NDArray[np.bool_]) -> Decision:
        """Decide for observations [N, …]."""
        noise = self._row()
        observed = on_device(obs, self._device)
        normaliser = self._network.normaliser
        if normaliser is not None and self._fresh():
            normaliser.look(observed)
        if self._on_host is not None:
            action = self._head.sample(torch.from_numpy(self._on_host(obs)), noise)
            return Decision(observed, self._head.sent(action), chosen=action)
        with torch.inference_mode():
            parameters, value = self._network(observed)
            action = self._head.sample(parameters, noise)
            log_prob = self._head.log_prob(parameters, action)
            return Decision(observed, self._head.sent(action), log_prob, value, action)

    def _row(self) -> Tensor:
        """Return the next row of noise [N, *noise_shape]."""
        if self._next == 0:
            self._head.draw_(self._noise, self._generator)
        row = self._noise[self._next]
        self._next = (self._next + 1) % len(self._noise)
        return row


class Norm(NamedTuple):
    """A layer norm, in place."""

    weight: Floats
    bias: Floats

    def __call__(self, x: Floats) -> None:
        """Normalise rows [N, F]."""
        x -= x.mean(1, keepdims=True)
        x /= np.sqrt(np.square(x).mean(1, keepdims=True) + NORM_EPSILON)
        x *= self.weight
        x += self.bias


class Layer(NamedTuple):
    """A linear layer, and the norm after it if there is one."""

    weight: Floats  # [in, out]
    bias: Floats  # [out]
    norm: Norm | None = None


class HostNetwork:
    """Linear layers with norms and an activation in place between them."""

    def __init__(self, layers: Sequence[Layer], activation: Activation) -> None:
        *self._hidden, self._last = layers
        self._activate = ACTIVATIONS[activation].on_host

    def __call__(self, x: NDArray[Any]) -> Floats:
        """Return the last layer's output [N, K] for inputs [N, D]."""
        for weight, bias, norm in self._hidden:
            x = x @ weight
            x += bias
            if norm is not None:
                norm(x)
            self._activate(x)
        y: Floats = x @ self._last.weight
        y += self._last.bias
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
        hidden = [_first_of_two(layer) for layer in trunk.twins]
        self._network = HostNetwork([*hidden, _layer(policy)], trunk.activation)
        n = network.normaliser
        self._statistics = None if n is None else (_array(n.shift), _array(n.scale))

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
    one_number, on_host = network.shape == (), network.advantage.weight.is_cpu
    if not (one_number and on_host and isinstance(network.trunk, Dense)):
        return None
    # The value of a dueling network is the same for all actions and cannot change the best.
    trunk = network.trunk
    norms = trunk.norms or [None] * len(trunk.layers)
    hidden = [_layer(layer, norm) for layer, norm in zip(trunk.layers, norms, strict=True)]
    return HostNetwork([*hidden, _layer(network.advantage)], trunk.activation)


def policy_on_host(network: ActorCritic) -> HostPolicy | None:
    """Return the policy in NumPy, or None where torch is as fast."""
    suits = isinstance(network.trunk, TwinTrunk) and network.value.weight.is_cpu
    return HostPolicy(network) if suits else None


def _layer(layer: nn.Module, norm: nn.Module | None = None) -> Layer:
    assert isinstance(layer, nn.Linear)
    after = None
    if norm is not None:
        assert isinstance(norm, nn.LayerNorm)
        after = Norm(_array(norm.weight), _array(norm.bias))
    return Layer(_array(layer.weight).T, _array(layer.bias), after)


def _first_of_two(layer: TwinLayer) -> Layer:
    norm = layer.norm
    after = None if norm is None else Norm(_array(norm.weight[0, 0]), _array(norm.bias[0, 0]))
    return Layer(_array(layer.weight[0]), _array(layer.bias[0, 0]), after)


def _array(tensor: Tensor) -> Floats:
    array: Floats = tensor.detach().numpy()
    return array
