"""Episode statistics that count valid rows only and keep nothing but running sums."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.rows import Rows
from envs.types import Episode


class Ends(NamedTuple):
    """What one row means for the score, where that is not what it means for the learner."""

    reward: NDArray[Any]  # [N] of rows that reset it is zero
    begun: NDArray[np.bool_]  # [N] episodes that begin after this row
    ended: NDArray[np.bool_]  # [N] episodes that end with this row
    skipped: NDArray[np.bool_]  # [N] rows that count for the reward only


class EpisodeStatistics:
    """Running return and length of each environment's episode."""

    def __init__(self, num_envs: int) -> None:
        self._return = np.zeros(num_envs)
        self._rows = 0  # rows recorded
        self._begin = np.zeros(num_envs, np.int64)  # rows recorded before the episode's first

    def clear(self) -> None:
        """Forget the episodes under way."""
        self._return[:] = 0.0
        self._begin[:] = self._rows

    def record(self, rows: Rows) -> tuple[Episode, ...]:
        """Count one row and return the episodes it ended.

        An invalid row starts an episode; what an environment had collected before a cut is dropped.
        """
        self._rows += 1
        self._return += rows.reward
        if rows.is_ordinary():
            return ()
        return self._close(~rows.valid, rows.terminated | rows.truncated)

    def record_ends(self, ends: Ends) -> tuple[Episode, ...]:
        """Count one row whose scores and ends are not the learner's."""
        self._rows += 1
        self._return += ends.reward
        self._begin += ends.skipped
        return self._close(ends.begun, ends.ended)

    def _close(self, begun: NDArray[np.bool_], ended: NDArray[np.bool_]) -> tuple[Episode, ...]:
        self._restart(begun)
        finished = tuple(
            Episode(env, float(self._return[env]), int(self._rows - self._begin[env]))
            for env in np.flatnonzero(ended).tolist()
        )
        self._restart(ended)
        return finished

    def _restart(self, where: NDArray[np.bool_]) -> None:
        self._return[where] = 0.0
        self._begin[where] = self._rows

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of the episodes under way."""
        return {"return": self._return.tolist(), "length": (self._rows - self._begin).tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._return[:] = state["return"]
        self._begin[:] = self._rows - np.asarray(state["length"])
