"""How PPO decides: by the network on its device, or in NumPy where that is faster."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from agents.actor_critic import ActorCritic
from agents.base import Decision
from agents.heads import Head
from agents.host_network import HostPolicy, policy_on_host
from buffers.rollout import RolloutBuffer


class Noise:
    """What a rollout's actions are sampled with, drawn for all its rows at once."""

    def __init__(
        self, head: Head, *, rows: int, num_envs: int, device: torch.device, seed: int
    ) -> None:
        self._head = head
        self._generator = torch.Generator(device).manual_seed(seed)
        self._rows = torch.zeros((rows, num_envs, *head.noise_shape), device=device)
        self._next = 0

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._rows.nbytes

    def row(self) -> Tensor:
        """Return the next row [N, *noise_shape]."""
        if self._next == 0:
            self._head.draw_(self._rows, self._generator)
        row = self._rows[self._next]
        self._next = (self._next + 1) % len(self._rows)
        return row

    def state_dict(self) -> dict[str, Any]:
        """Return the generator, and what it has drawn already."""
        rows = self._rows.clone()
        return {"generator": self._generator.get_state(), "rows": rows, "next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._generator.set_state(state["generator"])
        self._rows.copy_(state["rows"])
        self._next = int(state["next"])


class Acting(Protocol):
    """Decides for observations [N, …] by the current weights of a network."""

    def sample(self, obs: NDArray[Any], noise: Noise) -> Decision:
        """Sample actions."""

    def greedy(self, obs: NDArray[Any]) -> Decision:
        """Take the most likely actions."""

    def score(self, rollout: RolloutBuffer, piece: int) -> None:
        """Complete a full rollout's log-probabilities and values, `piece` rows at a time."""


class ActingOnDevice:
    """One forward pass gives action, log-probability and value."""

    def __init__(self, network: ActorCritic, head: Head, device: torch.device) -> None:
        self._network, self._head, self._device = network, head, device

    @torch.inference_mode()
    def sample(self, obs: NDArray[Any], noise: Noise) -> Decision:
        """Sample actions."""
        observed = self._observed(obs)
        parameters, value = self._network(observed)
        action = self._head.sample(parameters, noise.row())
        log_prob = self._head.log_prob(parameters, action)
        return Decision(observed, self._head.sent(action), log_prob, value, action)

    @torch.inference_mode()
    def greedy(self, obs: NDArray[Any]) -> Decision:
        """Take the most likely actions."""
        observed = self._observed(obs)
        return Decision(observed, self._head.sent(self._head.greedy(self._network(observed)[0])))

    def score(self, rollout: RolloutBuffer, piece: int) -> None:
        """Add nothing: the rows came complete."""

    def _observed(self, obs: NDArray[Any]) -> Tensor:
        return torch.from_numpy(obs).to(self._device, non_blocking=True)


class ActingOnHost:
    """The policy alone, in NumPy; log-probabilities and values follow for all rows at once.

    They come from the network that the update uses, so that its first ratio is 1 although
    NumPy's sums may differ from torch's in the last digit.
    """

    def __init__(self, network: ActorCritic, head: Head, policy: HostPolicy) -> None:
        self._network, self._head, self._policy = network, head, policy

    def sample(self, obs: NDArray[Any], noise: Noise) -> Decision:
        """Sample actions."""
        parameters = torch.from_numpy(self._policy(obs))
        action = self._head.sample(parameters, noise.row())
        return Decision(torch.from_numpy(obs), self._head.sent(action), chosen=action)

    def greedy(self, obs: NDArray[Any]) -> Decision:
        """Take the most likely actions."""
        parameters = torch.from_numpy(self._policy(obs))
        return Decision(torch.from_numpy(obs), self._head.sent(self._head.greedy(parameters)))

    @torch.inference_mode()
    def score(self, rollout: RolloutBuffer, piece: int) -> None:
        """Complete a full rollout's log-probabilities and values, `piece` rows at a time."""
        stored = (rollout.obs, rollout.action, rollout.log_prob, rollout.value[:-1])
        pieces = (tensor.flatten(0, 1).split(piece) for tensor in stored)
        for obs, action, log_prob, value in zip(*pieces, strict=True):
            parameters, values = self._network(obs)
            log_prob.copy_(self._head.log_prob(parameters, action))
            value.copy_(values)


def build_acting(network: ActorCritic, head: Head, device: torch.device) -> Acting:
    """Return the fastest way to decide on this device."""
    policy = policy_on_host(network)
    if policy is None:
        return ActingOnDevice(network, head, device)
    return ActingOnHost(network, head, policy)
