"""Environments that one simulator steps all in one call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs.faults import Faults
from envs.row import Row
from envs.settings import EnvSettings
from envs.single import episode_seed
from envs.types import EnvSpec
from envs.vector import Backend


class Simulator(ABC):
    """N environments that are seeded when all start and never in between."""

    spec: EnvSpec

    @abstractmethod
    def start(self, row: Row, seeds: list[int]) -> None:
        """Seed and reset all environments; write their frames."""

    @abstractmethod
    def send(self, action: NDArray[Any]) -> None:
        """Begin a step of all environments."""

    @abstractmethod
    def receive(self, row: Row, done: NDArray[np.bool_]) -> None:
        """Finish the step and write the row; `done` [N]: whose row is a reset, then whose next."""

    def snapshot(self) -> dict[str, Any] | None:
        """Return the whole state, None when it cannot be had."""
        return None

    def restore(self, saved: dict[str, Any]) -> bool:
        """Put a snapshot back; say whether that could be done."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Free everything; safe to call twice and after a failure."""


class BatchBackend(Backend):
    """N environments behind one simulator.

    One that does not give its state away starts anew when it is restored: the next row of every
    environment is then a reset.
    """

    def __init__(self, simulator: Simulator, settings: EnvSettings, *, seed: int) -> None:
        self.simulator = simulator
        self.spec = simulator.spec
        self.faults = Faults(settings.max_restarts)
        self._seed = seed
        self._starts = 0  # how often all environments were started; each start has its own seeds
        self._cut = False  # the next row starts all environments
        self._done = np.ones(self.spec.num_envs, np.bool_)  # whose next row is a reset

    def start(self, row: Row) -> None:
        """Start every environment anew; the row holds their first frames."""
        envs = range(self.spec.num_envs)
        try:
            self.simulator.start(row, [episode_seed(self._seed, env, self._starts) for env in envs])
        except BaseException as error:
            self.faults.give_up(self.spec.id, error)
        self._starts += 1
        self._cut = False
        self._done[:] = False
        row.set_all_reset()

    def launch(self, action: NDArray[Any], row: Row) -> None:
        """Begin a step [N, …] whose outcome this row will hold."""
        if not self._cut:
            self.simulator.send(action)

    def collect(self, row: Row) -> None:
        """Finish the step begun last and fill the row."""
        if self._cut:
            self.start(row)
            return
        try:
            self.simulator.receive(row, self._done)
        except BaseException as error:
            self.faults.give_up(self.spec.id, error)

    def snapshot(self) -> dict[str, Any]:
        """Return the plain state: of the simulator itself where it can be taken."""
        idle = self._cut or not self._starts
        return {
            "seed": self._seed,
            "starts": self._starts,
            "done": self._done,
            "simulator": None if idle else self.simulator.snapshot(),
        }

    def restore(
        self, saved: dict[str, Any], past: list[NDArray[Any] | None], row: Row
    ) -> NDArray[np.bool_]:
        """Put a snapshot back; where there is none all start anew."""
        self._seed, self._starts = saved["seed"], saved["starts"]
        self._done[:] = saved["done"].numpy()
        snapshot = saved["simulator"]
        self._cut = snapshot is None or not self.simulator.restore(snapshot)
        return np.full(self.spec.num_envs, not self._cut)

    def cut(self, env: int) -> None:
        """Let the next row of all environments be a reset: one alone cannot be."""
        self._cut = True

    def close(self) -> None:
        """Free the simulator."""
        self.simulator.close()


def fill(
    row: Row,
    done: NDArray[np.bool_],
    reward: Any,
    terminated: NDArray[np.bool_],
    truncated: NDArray[np.bool_],
) -> None:
    """Write all but the frames of a row in which those that were done have reset."""
    np.logical_not(done, out=row.valid)
    np.multiply(reward, row.valid, out=row.reward, casting="unsafe")
    row.terminated[:] = terminated & row.valid
    row.truncated[:] = truncated & row.valid
    np.logical_or(terminated, truncated, out=done)
