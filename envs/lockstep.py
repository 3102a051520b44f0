"""What all backends share: alternating rows, steps, episode statistics, the finite check."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs.episodes import EpisodeStatistics
from envs.faults import not_finite
from envs.rows import Rows
from envs.types import EnvSpec, Episode, Step, VectorEnv
from memory.errors import NonFiniteError


class LockstepEnv(VectorEnv):
    """N environments whose rows alternate between two preallocated sets of arrays."""

    steps = 0  # rows since the start of the run

    def __init__(self, spec: EnvSpec, rows: tuple[Rows, Rows] | None = None) -> None:
        self.spec = spec
        self._rows = rows or (Rows(spec), Rows(spec))
        self._turn = 0
        self._statistics = EpisodeStatistics(spec.num_envs)
        self._under_way = False
        self._started = False

    @property
    def observation(self) -> NDArray[Any]:
        """The current observations [N, …], which the next action is decided on."""
        return self._rows[self._turn].obs

    @property
    def starts(self) -> NDArray[np.bool_]:
        """Whose current observation is the first of an episode [N]: whose last row was a reset."""
        return ~self._rows[self._turn].valid

    def reset(self) -> NDArray[Any]:
        """Start every environment anew and return the first observations [N, …]."""
        rows = self._next()
        self._start_all(rows)
        self._check_finite(rows)
        self._statistics.clear()
        self._under_way = False
        self._started = True
        return rows.obs

    def send(self, action: NDArray[Any]) -> None:
        """Hand one action per environment over; rows that reset ignore theirs."""
        if self._under_way or not self._started:
            raise RuntimeError("send() needs a reset() before it and one receive() after it")
        self._under_way = True
        self._launch(action, self._rows[1 - self._turn])

    def receive(self) -> Step:
        """Return the row that the last `send` led to."""
        if not self._under_way:
            raise RuntimeError("receive() needs a send() before it")
        self._under_way = False
        rows = self._next()
        self._collect(rows)
        self._check_finite(rows)
        self.steps += 1
        episodes = self._count(rows)
        return Step(rows.obs, rows.reward, rows.terminated, rows.truncated, rows.valid, episodes)

    def _count(self, rows: Rows) -> tuple[Episode, ...]:
        """Count a row's rewards and return the episodes it ended."""
        return self._statistics.record(rows)

    def _next(self) -> Rows:
        self._turn = 1 - self._turn
        return self._rows[self._turn]

    def _check_finite(self, rows: Rows) -> None:
        while not rows.is_finite():
            name, env = rows.not_finite()
            self._repair(env, not_finite(name, env, self.steps), rows)

    @abstractmethod
    def _start_all(self, rows: Rows) -> None:
        """Reset every environment into these rows."""

    @abstractmethod
    def _launch(self, action: NDArray[Any], rows: Rows) -> None:
        """Begin the step whose outcome these rows will hold."""

    @abstractmethod
    def _collect(self, rows: Rows) -> None:
        """Finish the step begun last and fill the rows."""

    def _repair(self, env: int, error: NonFiniteError, rows: Rows) -> None:
        """Make good an environment whose numbers are not finite; by default it cannot be done."""
        raise error
