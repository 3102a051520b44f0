"""Those who decide: ε-greedily, by sampling, or greedily, by the weights of this moment.

Each reads a network that somebody else may be changing, and owns what it draws with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agents.actor_critic import ActorCritic
from agents.base import Actor, Decision
from agents.heads import Head
from agents.host_network import Floats, HostPolicy

Observations = NDArray[Any]  # [N, …]


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
        self._network, self._on_host, self._device = network, on_host, device
        self._choose = choose  # actions [N, …] by outputs [N, …]

    def act(self, obs: Observations, starts: NDArray[np.bool_]) -> Decision:
        """Decide for observations [N, …]."""
        observed = self.observed(obs)
        if self._on_host is not None:
            return Decision(observed, self._choose(torch.from_numpy(self._on_host(obs))))
        with torch.inference_mode():
            return Decision(observed, self._choose(self._network(observed)))

    def observed(self, obs: Observations) -> Tensor:
        """Return observations on the network's device."""
        return on_device(obs, self._device)


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
            return Decision(self._greedy.observed(obs), torch.from_numpy(chosen))
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
