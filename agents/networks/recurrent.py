"""Recurrent actor-critics: a cell between trunk and heads, unrolled over sequences.

A hidden state [S, G, C] belongs to S sequences and G cells, one shared by both heads or one for
each. Its C numbers are h of a GRU (Cho et al. 2014), or h and c of an LSTM (Hochreiter &
Schmidhuber 1997).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from steadyrl.agents.networks.actor_critic import ActorCritic, SharedTrunk
from steadyrl.agents.networks.distributions import Head
from steadyrl.agents.networks.settings import Init

GATES = {"gru": 3, "lstm": 4}


class RecurrentCell(nn.Module):
    """G cells as batched products that can be traced; gates in torch's order.

    Inputs of all timesteps are multiplied at once; only the recurrence is a loop.
    """

    def __init__(self, kind: str, features: int, size: int, groups: int, max_length: int) -> None:
        super().__init__()
        self.lstm, self.size, self._max_length = kind == "lstm", size, max_length
        self.hidden_shape = (groups, 2 * size if self.lstm else size)
        columns = GATES[kind] * size
        self.weight_ih = nn.Parameter(torch.empty(groups, features, columns))
        self.weight_hh = nn.Parameter(torch.empty(groups, size, columns))
        self.bias = nn.Parameter(torch.empty(groups, 1, columns))
        # A GRU's candidate has two biases: its reset gate scales the hidden one.
        self.candidate_bias_hh = None if self.lstm else nn.Parameter(torch.empty(groups, 1, size))

    def forward(
        self, x: Tensor, hidden_state: Tensor, episode_starts: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return outputs [G, S·L, H] for features [G, S·L, F], and the final hidden state.

        The hidden state is reset before timesteps that start an episode (`episode_starts` [S·L]).
        """
        sequences = len(hidden_state)
        length = x.shape[1] // sequences
        input_part = torch.baddbmm(self.bias, x, self.weight_ih)
        timesteps = input_part.view(len(x), sequences, length, -1).unbind(2)
        continues = (
            None
            if episode_starts is None
            else (~episode_starts).float().view(1, sequences, length, 1)
        )
        state, states = hidden_state.transpose(0, 1), []
        for t, timestep in enumerate(timesteps):
            if continues is not None:
                state = state * continues[:, :, t]
            state = (
                self._lstm_step(timestep, state) if self.lstm else self._gru_step(timestep, state)
            )
            states.append(state[..., : self.size])
        outputs = torch.stack(states, 2).flatten(1, 2)
        return outputs, state.transpose(0, 1)

    def _gru_step(self, timestep: Tensor, h: Tensor) -> Tensor:
        """Return h' = (1 − z)·n + z·h, n = tanh(W x + b + r·(U h + b')) [G, S, H]."""
        assert self.candidate_bias_hh is not None
        wide = 2 * self.size
        hidden_part = torch.bmm(h, self.weight_hh)
        reset, keep = (timestep[..., :wide] + hidden_part[..., :wide]).sigmoid().chunk(2, -1)
        new = (
            timestep[..., wide:] + reset * (hidden_part[..., wide:] + self.candidate_bias_hh)
        ).tanh()
        return new + keep * (h - new)

    def _lstm_step(self, timestep: Tensor, state: Tensor) -> Tensor:
        """Return (h', c') [G, S, 2H], h' = o·tanh(c'), c' = f·c + i·g."""
        h, c = state.chunk(2, -1)
        gates = torch.baddbmm(timestep, h, self.weight_hh)
        put, keep, new, out = gates.chunk(4, -1)
        c = keep.sigmoid() * c + put.sigmoid() * new.tanh()
        return torch.cat((out.sigmoid() * c.tanh(), c), -1)

    def hidden_matrices(self) -> dict[str, int]:
        """Return the names of weights between hidden layers, with the matrices in each."""
        return dict.fromkeys(("weight_ih", "weight_hh"), GATES["lstm" if self.lstm else "gru"])

    def reset_parameters(self, generator: torch.Generator, init: Init) -> None:
        """Initialise gates orthogonally and forget biases by chrono initialisation, or uniformly.

        Chrono initialisation spreads time constants from 2 to `max_length` timesteps (Tallec &
        Ollivier 2018).
        """
        if init == "uniform":
            bound = 1 / math.sqrt(self.size)
            for parameter in self.parameters():
                nn.init.uniform_(parameter, -bound, bound, generator=generator)
            return
        for weights in (self.weight_ih, self.weight_hh):
            for gate in weights.data.split(self.size, -1):
                for one in gate:
                    one.copy_(nn.init.orthogonal_(torch.empty(one.shape), generator=generator))
        nn.init.zeros_(self.bias)
        if self.candidate_bias_hh is not None:
            nn.init.zeros_(self.candidate_bias_hh)
        chrono_bias = torch.linspace(1, max(1, self._max_length - 1), self.size).log()
        self.bias.data[..., self.size : 2 * self.size] = (
            chrono_bias  # of the forget (LSTM) or update (GRU) gate
        )
        if self.lstm:
            self.bias.data[..., : self.size] = -chrono_bias


class RecurrentActorCritic(ActorCritic):
    """An actor-critic with a recurrent cell after each trunk."""

    def __init__(
        self,
        observation_shape: tuple[int, ...],
        dtype: str,
        head: Head,
        *,
        recurrent: str,
        size: int,
        max_length: int,
        hidden: Sequence[int],
        log_std: float | None,
        **others: Any,
    ) -> None:
        """Take `ActorCritic`'s arguments, the cell's kind and size, and the longest sequence."""
        super().__init__(observation_shape, dtype, head, hidden=hidden, log_std=log_std, **others)
        groups = 1 if isinstance(self.trunk, SharedTrunk) else 2
        self.cell = RecurrentCell(recurrent, hidden[-1], size, groups, max_length)
        self.policy = head.layer(size, log_std)
        self.value = nn.Linear(size, 1)

    def forward(  # type: ignore[override]
        self, obs: Tensor, hidden_state: Tensor, episode_starts: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return parameters [S·L, P], values [S·L] and the final hidden states of S sequences.

        Timesteps of a sequence are adjacent; without `episode_starts` [S·L], none is reset.
        """
        features = torch.stack(self.trunk(self.preprocess(obs))[: self.cell.hidden_shape[0]])
        outputs, hidden_state = self.cell(features, hidden_state, episode_starts)
        # With one cell, both heads read the same output.
        parameters = self.allowed(self.policy(outputs[0]), obs)
        return parameters, self.value(outputs[-1]).squeeze(-1), hidden_state

    def hidden_matrices(self) -> dict[str, int]:
        """Return the names of weights between hidden layers, with the matrices in each."""
        of_cell = {f"cell.{name}": many for name, many in self.cell.hidden_matrices().items()}
        return super().hidden_matrices() | of_cell

    def reset_parameters(self, generator: torch.Generator, init: Init = "auto") -> None:
        """Initialise the actor-critic, then the cells."""
        super().reset_parameters(generator, init)
        self.cell.reset_parameters(generator, init)
