"""Actors of recurrent policies: they carry a hidden state from step to step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from steadyrl.agents.actors.sampling import SamplingActor
from steadyrl.agents.base import Actor, Decision
from steadyrl.agents.learner.precision import Forward
from steadyrl.agents.networks.distributions import Head
from steadyrl.buffers.memory_layout import all_to_device, to_device
from steadyrl.core.saved_state import tensor

if TYPE_CHECKING:
    from steadyrl.agents.networks.recurrent import RecurrentActorCritic


class RecurrentSamplingActor(SamplingActor):
    """Sample actions from a recurrent policy; the hidden state is part of the actor's state."""

    hidden_state: Tensor
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
    def act(self, obs: NDArray[Any], episode_starts: NDArray[np.bool_]) -> Decision:
        """Sample actions for observations [N, …]; the decision holds the hidden state before."""
        noise = self._next_noise()
        observed, continues = all_to_device(self._device, obs, ~episode_starts)
        self._preview_statistics(observed)
        with torch.inference_mode():
            before = self.hidden_state * continues.view(-1, 1, 1)
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
        continues = to_device(valid, self._device)
        value: Tensor = forward(observed, self.hidden_state * continues.view(-1, 1, 1))[1]
        return value


class RecurrentGreedyActor(Actor):
    """Take the greedy action of a recurrent network; the decision holds the hidden state before.

    `network` maps observations [N, …] and hidden states [N, …] to outputs [N, …], possibly more,
    and at last the next hidden states; `choose` maps its outputs to actions.
    """

    hidden_state: Tensor
    state_names = ("hidden_state",)

    def __init__(
        self,
        network: Callable[..., tuple[Tensor, ...]],
        choose: Callable[[Tensor], Tensor],
        hidden_state: Tensor,
    ) -> None:
        """Take the hidden states [N, …] of the first step, on the network's device."""
        self._network, self._choose = network, choose
        self.hidden_state = hidden_state

    @property
    @override
    def nbytes(self) -> int:
        return self.hidden_state.nbytes

    def act(self, obs: NDArray[Any], episode_starts: NDArray[np.bool_]) -> Decision:
        """Return the greedy actions for observations [N, …]; a new N resets the hidden state."""
        observed, continues = all_to_device(self.hidden_state.device, obs, ~episode_starts)
        shape = len(obs), *self.hidden_state.shape[1:]
        if self.hidden_state.shape != shape:
            self.hidden_state = self.hidden_state.new_zeros(shape)
        with torch.inference_mode():
            before = self.hidden_state * continues.view(-1, 1, 1)
            outputs, *_, after = self._network(observed, before)
            self.hidden_state.copy_(after)
            return Decision(observed, self._choose(outputs), hidden_state=before)

    @override
    def check_decision(self, decision: Decision) -> None:
        tensor(decision.hidden_state, tuple(self.hidden_state.shape), torch.float32)
