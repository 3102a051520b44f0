"""What the backends share that step all environments in one call."""

from __future__ import annotations

import logging
from abc import abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs.lockstep import LockstepEnv
from envs.rows import Rows
from envs.types import EnvironmentFailedError, EnvSpec
from memory.errors import describe

LOG = logging.getLogger("steadyrl")


class BatchEnv(LockstepEnv):
    """N environments behind one simulator, seeded when all start and never in between.

    A simulator that does not give its state away starts anew when it is restored: the next row of
    every environment is then a reset.
    """

    def __init__(self, spec: EnvSpec, *, seed: int) -> None:
        super().__init__(spec)
        self._seed = seed
        self._starts = 0  # how often all environments were started; each start has its own seed
        self._cut = False  # the next row starts all environments
        self._done = np.ones(spec.num_envs, np.bool_)  # whose next row is a reset

    def _start_all(self, rows: Rows) -> None:
        try:
            self._begin_batch(rows, self._starts)
        except Exception as error:
            raise self._failure(error) from error
        self._starts += 1
        self._cut = False
        self._done[:] = False
        rows.set_all_reset()

    def _launch(self, action: NDArray[Any], rows: Rows) -> None:
        if not self._cut:
            self._send_batch(action)

    def _collect(self, rows: Rows) -> None:
        if self._cut:
            self._start_all(rows)
            return
        try:
            self._receive_batch(rows)
        except Exception as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> EnvironmentFailedError:
        """Name the simulator and the step of what went wrong; it cannot be built anew."""
        return EnvironmentFailedError(
            f"{self.spec.id} failed at step {self.steps}: {describe(error)}"
        )

    def _fill(
        self, rows: Rows, reward: Any, terminated: NDArray[np.bool_], truncated: NDArray[np.bool_]
    ) -> None:
        """Write all but the frames of a row in which those that were done have reset."""
        np.logical_not(self._done, out=rows.valid)
        np.multiply(reward, rows.valid, out=rows.reward, casting="unsafe")
        rows.terminated[:] = terminated & rows.valid
        rows.truncated[:] = truncated & rows.valid
        np.logical_or(terminated, truncated, out=self._done)

    def state_dict(self) -> dict[str, Any]:
        """Return the plain state: statistics and, where it can be taken, the simulator's own."""
        import torch  # here, so that a configuration is checked without it

        if self._under_way:
            raise RuntimeError("the state is whole between receive() and send() only")
        return {
            "steps": self.steps,
            "started": self._started,
            "seed": self._seed,
            "starts": self._starts,
            "cut": self._cut,
            "done": self._done.tolist(),
            "simulator": self._snapshot() if self._started and not self._cut else None,
            "obs": torch.from_numpy(self.observation.copy()),
            "statistics": self._statistics.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave; a simulator that cannot continue is cut."""
        if len(state["done"]) != self.spec.num_envs:
            raise ValueError(
                f"the state is of {len(state['done'])} environments, there are {self.spec.num_envs}"
            )
        self.steps, self._started, self._seed = state["steps"], state["started"], state["seed"]
        self._starts = state["starts"]
        self._under_way = False
        self._done[:] = state["done"]
        self._statistics.load_state_dict(state["statistics"])
        self._next().obs[...] = state["obs"].numpy()
        self._cut = self._started and state["simulator"] is None
        if self._cut:
            LOG.warning("%s cannot continue its episodes: it starts new ones", self.spec.id)
        elif self._started:
            self._restore(state["simulator"])

    @abstractmethod
    def _begin_batch(self, rows: Rows, start: int) -> None:
        """Seed and reset all environments for the start of this number; write the frames."""

    @abstractmethod
    def _send_batch(self, action: NDArray[Any]) -> None:
        """Begin a step of all environments."""

    @abstractmethod
    def _receive_batch(self, rows: Rows) -> None:
        """Finish the step and write the rows."""

    def _snapshot(self) -> dict[str, Any] | None:
        """Return the state of the simulator, None when it cannot be had."""
        return None

    def _restore(self, simulator: dict[str, Any]) -> None:
        """Put a snapshot back."""
        raise NotImplementedError("this simulator gives no snapshots")
