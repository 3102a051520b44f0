"""Networks that remember, and those who decide by them, each with a carry of its own.

A cell stands between the trunk and the heads, unrolled over sequences. A carry [S, G, C] is what S
sequences remember: G cells, one for both heads or one each, with C numbers, h of a GRU (Cho et al.
2014) or h and c of an LSTM (Hochreiter & Schmidhuber 1997).
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
    """Cells side by side as plain products, so that a graph can hold them; gates as torch orders.

    The features of all rows are multiplied at once; only what depends on the row before is a loop.
    """

    def __init__(self, kind: str, features: int, size: int, groups: int, max_length: int) -> None:
        super().__init__()
        self.lstm, self.size, self._max_length = kind == "lstm", size, max_length
        self.hidden_shape = (groups, 2 * size if self.lstm else size)
        columns = GATES[kind] * size
        self.weight_ih = nn.Parameter(torch.empty(groups, features, columns))
        self.weight_hh = nn.Parameter(torch.empty(groups, size, columns))
        self.bias = nn.Parameter(torch.empty(groups, 1, columns))
        # The reset gate of a GRU is between two biases of the candidate.
        self.candidate_bias_hh = None if self.lstm else nn.Parameter(torch.empty(groups, 1, size))

    def forward(
        self, x: Tensor, hidden_state: Tensor, episode_starts: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return what is remembered at rows [G, S·L, H] of features [G, S·L, F], and at the end.

        Before a row that `episode_starts` [S·L] an episode everything is forgotten.
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
        """Return h' = o·tanh(c'), c' = f·c + i·g, side by side [G, S, 2H]."""
        h, c = state.chunk(2, -1)
        gates = torch.baddbmm(timestep, h, self.weight_hh)
        put, keep, new, out = gates.chunk(4, -1)
        c = keep.sigmoid() * c + put.sigmoid() * new.tanh()
        return torch.cat((out.sigmoid() * c.tanh(), c), -1)

    def reset_parameters(self, generator: torch.Generator, init: Init) -> None:
        """Initialise every gate orthogonally, and its numbers to last differently, or uniformly.

        They fade within 1 to so many rows as a sequence has (Tallec & Ollivier 2018).
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
        self.bias.data[..., self.size : 2 * self.size] = chrono_bias  # of the gate that keeps them
        if self.lstm:
            self.bias.data[..., : self.size] = -chrono_bias


class RecurrentActorCritic(ActorCritic):
    """Trunk or trunks, a cell for each of them, and two heads on what the cells remember."""

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
        log_std: float,
        **others: Any,
    ) -> None:
        """Take what an `ActorCritic` takes, the kind of cell, its size and the longest sequence."""
        super().__init__(observation_shape, dtype, head, hidden=hidden, log_std=log_std, **others)
        groups = 1 if isinstance(self.trunk, SharedTrunk) else 2
        self.cell = RecurrentCell(recurrent, hidden[-1], size, groups, max_length)
        self.policy = head.layer(size, log_std)
        self.value = nn.Linear(size, 1)

    def forward(  # type: ignore[override]
        self, obs: Tensor, hidden_state: Tensor, episode_starts: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return parameters [S·L, P], values [S·L] and the carry after each of S sequences.

        The rows of a sequence are side by side; without `episode_starts` [S·L] none begins an episode.
        """
        features = torch.stack(self.trunk(self.preprocess(obs))[: self.cell.hidden_shape[0]])
        outputs, hidden_state = self.cell(features, hidden_state, episode_starts)
        # One cell tells both heads.
        parameters = self.allowed(self.policy(outputs[0]), obs)
        return parameters, self.value(outputs[-1]).squeeze(-1), hidden_state

    def reset_parameters(self, generator: torch.Generator, init: Init = "auto") -> None:
        """Initialise as without memory, and then the cells."""
        super().reset_parameters(generator, init)
        self.cell.reset_parameters(generator, init)
