"""Actors of recurrent policies: they carry a hidden state from step to step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from steadyrl.agents.actors.greedy import Observations, obs_to_device
from steadyrl.agents.actors.sampling import SamplingActor
from steadyrl.agents.base import Actor, Decision
from steadyrl.agents.learner.precision import Forward
from steadyrl.agents.networks.distributions import Head
from steadyrl.buffers.memory_layout import send
from steadyrl.core.saved_state import tensor

if TYPE_CHECKING:
    from steadyrl.agents.networks.recurrent import RecurrentActorCritic


class RecurrentSamplingActor(SamplingActor):
    """Sample actions from a recurrent policy; the hidden state is part of the actor's state."""

    state_names = (*SamplingActor.state_names, "hidden_state")

    def __init__(
        self,
        network: RecurrentActorCritic,
        head: Head,
        *,
        timesteps: int,
        num_envs: int,
        device: torch.device,
        seed: int,
    ) -> None:
        super().__init__(
            network, head, None, timesteps=timesteps, num_envs=num_envs, device=device, seed=seed
        )
        self._recurrent_network = network
        self.hidden_state = torch.zeros((num_envs, *network.cell.hidden_shape), device=device)

    @property
    @override
    def nbytes(self) -> int:
        return super().nbytes + self.hidden_state.nbytes

    @override
    def act(self, obs: Observations, episode_starts: NDArray[np.bool_]) -> Decision:
        """Sample actions for observations [N, …]; the decision holds the hidden state before."""
        noise = self._next_noise()
        observed, continues = obs_and_continues(obs, ~episode_starts, self._device)
        self._preview_statistics(observed)
        with torch.inference_mode():
            before = self.hidden_state * continues
            parameters, value, after = self._recurrent_network(observed, before)
            self.hidden_state.copy_(after)
            action = self._head.sample(parameters, noise)
            log_prob = self._head.log_prob(parameters, action)
            sent = self._head.to_env(action)
        return Decision(observed, sent, log_prob, value, action, before)

    @override
    def check_decision(self, decision: Decision) -> None:
        super().check_decision(decision)
        tensor(decision.hidden_state, tuple(self.hidden_state.shape), torch.float32)

    def values(self, observed: Tensor, valid: NDArray[np.bool_], forward: Forward) -> Tensor:
        """Return the values [N] after the last timestep, which was `valid` [N] or not.

        `forward` is the network's forward pass in the precision of updates.
        """
        continues = obs_to_device(valid, self._device)
        value: Tensor = forward(observed, self.hidden_state * continues.view(-1, 1, 1))[1]
        return value


class RecurrentGreedyActor(Actor):
    """Take the mode of a recurrent policy."""

    def __init__(self, network: RecurrentActorCritic, head: Head, device: torch.device) -> None:
        self._network, self._head, self._device = network, head, device
        self._hidden_state = torch.zeros((0, *network.cell.hidden_shape), device=device)

    def act(self, obs: Observations, episode_starts: NDArray[np.bool_]) -> Decision:
        """Return the modes for observations [N, …]; a new N resets the hidden state."""
        observed, continues = obs_and_continues(obs, ~episode_starts, self._device)
        with torch.inference_mode():
            if len(obs) != len(self._hidden_state):
                self._hidden_state = self._hidden_state.new_zeros(
                    (len(obs), *self._hidden_state.shape[1:])
                )
            parameters, _, after = self._network(observed, self._hidden_state * continues)
            self._hidden_state = after
            return Decision(observed, self._head.to_env(self._head.greedy(parameters)))


def obs_and_continues(
    obs: Observations, continues_: NDArray[np.bool_], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return observations on the network's device, and `continues` as a mask [N, 1, 1]."""
    if device.type == "cpu":
        observed, continues = torch.from_numpy(obs), torch.from_numpy(continues_)
    else:
        observed, continues = send(device, obs, continues_)
    return observed, continues.view(-1, 1, 1)
