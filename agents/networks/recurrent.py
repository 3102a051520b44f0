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


class Memory(nn.Module):
    """Cells side by side as plain products, so that a graph can hold them; gates as torch orders.

    The features of all rows are multiplied at once; only what depends on the row before is a loop.
    """

    def __init__(self, kind: str, features: int, size: int, groups: int, longest: int) -> None:
        super().__init__()
        self.lstm, self.size, self._longest = kind == "lstm", size, longest
        self.carry_shape = (groups, 2 * size if self.lstm else size)
        columns = GATES[kind] * size
        self.of_input = nn.Parameter(torch.empty(groups, features, columns))
        self.of_carry = nn.Parameter(torch.empty(groups, size, columns))
        self.bias = nn.Parameter(torch.empty(groups, 1, columns))
        # The reset gate of a GRU is between two biases of the candidate.
        self.inner = None if self.lstm else nn.Parameter(torch.empty(groups, 1, size))

    def forward(self, x: Tensor, carry: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what is remembered at rows [G, S·L, H] of features [G, S·L, F], and at the end.

        Before a row that `starts` [S·L] an episode everything is forgotten.
        """
        sequences = len(carry)
        length = x.shape[1] // sequences
        given = torch.baddbmm(self.bias, x, self.of_input)
        rows = given.view(len(x), sequences, length, -1).unbind(2)
        goes_on = None if starts is None else (~starts).float().view(1, sequences, length, 1)
        state, told = carry.transpose(0, 1), []
        for t, row in enumerate(rows):
            if goes_on is not None:
                state = state * goes_on[:, :, t]
            state = self._long(row, state) if self.lstm else self._gated(row, state)
            told.append(state[..., : self.size])
        every = torch.stack(told, 2).flatten(1, 2)
        return every, state.transpose(0, 1)

    def _gated(self, row: Tensor, h: Tensor) -> Tensor:
        """Return h' = (1 − z)·n + z·h, n = tanh(W x + b + r·(U h + b')) [G, S, H]."""
        assert self.inner is not None
        wide = 2 * self.size
        of_h = torch.bmm(h, self.of_carry)
        reset, keep = (row[..., :wide] + of_h[..., :wide]).sigmoid().chunk(2, -1)
        new = (row[..., wide:] + reset * (of_h[..., wide:] + self.inner)).tanh()
        return new + keep * (h - new)

    def _long(self, row: Tensor, state: Tensor) -> Tensor:
        """Return h' = o·tanh(c'), c' = f·c + i·g, side by side [G, S, 2H]."""
        h, c = state.chunk(2, -1)
        gates = torch.baddbmm(row, h, self.of_carry)
        put, keep, new, out = gates.chunk(4, -1)
        c = keep.sigmoid() * c + put.sigmoid() * new.tanh()
        return torch.cat((out.sigmoid() * c.tanh(), c), -1)

    def start_(self, generator: torch.Generator, init: Init) -> None:
        """Initialise every gate orthogonally, and its numbers to last differently, or uniformly.

        They fade within 1 to so many rows as a sequence has (Tallec & Ollivier 2018).
        """
        if init == "uniform":
            bound = 1 / math.sqrt(self.size)
            for parameter in self.parameters():
                nn.init.uniform_(parameter, -bound, bound, generator=generator)
            return
        for weights in (self.of_input, self.of_carry):
            for gate in weights.data.split(self.size, -1):
                for one in gate:
                    one.copy_(nn.init.orthogonal_(torch.empty(one.shape), generator=generator))
        nn.init.zeros_(self.bias)
        if self.inner is not None:
            nn.init.zeros_(self.inner)
        lasting = torch.linspace(1, max(1, self._longest - 1), self.size).log()
        self.bias.data[..., self.size : 2 * self.size] = lasting  # of the gate that keeps them
        if self.lstm:
            self.bias.data[..., : self.size] = -lasting


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
        longest: int,
        hidden: Sequence[int],
        log_std: float,
        **others: Any,
    ) -> None:
        """Take what an `ActorCritic` takes, the kind of cell, its size and the longest sequence."""
        super().__init__(observation_shape, dtype, head, hidden=hidden, log_std=log_std, **others)
        groups = 1 if isinstance(self.trunk, SharedTrunk) else 2
        self.memory = Memory(recurrent, hidden[-1], size, groups, longest)
        self.policy = head.layer(size, log_std)
        self.value = nn.Linear(size, 1)

    def forward(  # type: ignore[override]
        self, obs: Tensor, carry: Tensor, starts: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return parameters [S·L, P], values [S·L] and the carry after each of S sequences.

        The rows of a sequence are side by side; without `starts` [S·L] none begins an episode.
        """
        features = torch.stack(self.trunk(self.seen(obs))[: self.memory.carry_shape[0]])
        every, carry = self.memory(features, carry, starts)
        # One cell tells both heads.
        parameters = self.allowed(self.policy(every[0]), obs)
        return parameters, self.value(every[-1]).squeeze(-1), carry

    def start_(self, generator: torch.Generator, init: Init = "auto") -> None:
        """Initialise as without memory, and then the cells."""
        super().start_(generator, init)
        self.memory.start_(generator, init)
