"""ε-greedy actor: a uniform action with probability ε, drawn per environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from steadyrl.agents.actors.greedy import ROWS_DRAWN, as_rows
from steadyrl.agents.base import Actor, Decision
from steadyrl.agents.engine.cpu.network import HostNetwork
from steadyrl.agents.engine.cpu.policy import explore
from steadyrl.agents.networks.action_mask import RANKS, Masks
from steadyrl.core.saved import Saved, set_numpy_generator
from steadyrl.core.state import give

if TYPE_CHECKING:
    from steadyrl.agents.actors.greedy import Greedy, Observations


class EpsilonGreedy(Actor):
    """Takes a random action with probability ε, one coin per environment, else the best one."""

    def __init__(
        self,
        greedy: Greedy,
        *,
        actions: int,
        epsilon: Callable[[], float],
        seed: int,
        masks: Masks | None = None,
    ) -> None:
        self._greedy, self._masks = greedy, masks
        network = greedy.on_host
        self.on_host = network if isinstance(network, HostNetwork) else None
        self.mirrored = greedy.refresh is not None  # by a copy of the weights
        self._epsilon = epsilon
        self._actions = actions if masks is None else RANKS  # of which any number are allowed
        self._generator = np.random.Generator(np.random.PCG64(seed))
        self._before = self._generator.bit_generator.state  # what was drawn was drawn from there
        self.coins = np.zeros((ROWS_DRAWN, 0))
        self.choices = np.zeros((ROWS_DRAWN, 0), np.int64)
        self.next = 0
        self._stale = False  # the rest is to be drawn anew

    def act(self, obs: Observations, starts: NDArray[np.bool_]) -> Decision:
        """Decide for observations [N, …]."""
        coins, choices = self._row(len(obs))
        if self.on_host is not None:
            if self._greedy.refresh is not None:
                self._greedy.refresh()
            action = np.empty((len(obs), 1), np.int64)
            drawn = coins, choices, self._epsilon()
            explore(self.on_host.plan, self.on_host.activation, as_rows(obs), *drawn, action)
            return Decision(torch.from_numpy(obs), torch.from_numpy(action[:, 0]))
        random = coins < self._epsilon()
        best = self._greedy.act(obs, starts)
        if self._masks is not None and random.any():
            choices = self._masks.pick(choices, obs)
        chosen = np.where(random, choices, best.action.numpy(force=True))
        return best._replace(action=torch.from_numpy(chosen))

    def _row(self, num_envs: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return the next row of coins and choices [N]."""
        if self.next == 0 or self._stale or self.coins.shape[1] != num_envs:
            self._draw(num_envs)
        row = self.next
        self.next = (row + 1) % ROWS_DRAWN
        return self.coins[row], self.choices[row]

    def _draw(self, num_envs: int) -> None:
        shape = (ROWS_DRAWN, num_envs)
        if self.coins.shape != shape:
            self.coins, self.choices = np.zeros(shape), np.zeros(shape, np.int64)
        self._before = self._generator.bit_generator.state
        self._generator.random(out=self.coins)
        self.choices[...] = self._generator.integers(self._actions, size=shape)
        self._stale = False

    @override
    def state_dict(self) -> dict[str, Any]:
        # What is drawn is drawn again from there.
        return {
            "generator": self._before if self.next else give(self._generator),
            "next": self.next,
        }

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        set_numpy_generator(self._generator, Saved(state, "actor").raw("generator"))
        self.next, self._stale = Saved(state, "actor").whole("next", 0, ROWS_DRAWN - 1), True
