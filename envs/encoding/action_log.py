"""Log of the running episodes' actions, so that a resumed run can replay them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

FIRST_CAPACITY = 1024
MAX_BYTES = 32 * 2**20


class ActionLog:
    """Actions [T, N, …] since the start of the oldest running episode.

    The array doubles up to `max_bytes`; beyond that the oldest half is dropped, and an episode that
    began in it cannot be replayed.
    """

    def __init__(self, num_envs: int, max_bytes: int = MAX_BYTES) -> None:
        self._actions = np.zeros((0, num_envs))
        self._size = 0
        self._start = [0] * num_envs  # index of each episode's first action; negative: dropped
        self._max_bytes = max_bytes

    def append(self, action: NDArray[Any]) -> None:
        """Append one action per environment."""
        if self._size == len(self._actions):
            self._grow(action)
        self._actions[self._size] = action
        self._size += 1

    def begin_episode(self, env: int) -> None:
        """Mark the next action as the first of a new episode."""
        self._start[env] = self._size

    def clear(self) -> None:
        """Drop all actions: every episode starts now."""
        self._size = 0
        self._start = [0] * len(self._start)

    def load(self, episodes: list[NDArray[Any] | None]) -> None:
        """Load the actions of every running episode; None: cannot be replayed."""
        self.clear()
        known = [actions for actions in episodes if actions is not None]
        if not known:
            self._start = [-1] * len(self._start)
            return
        length = max(map(len, known))
        self._actions = np.zeros((length, len(episodes), *known[0].shape[1:]), known[0].dtype)
        self._size = length
        for env, actions in enumerate(episodes):
            self._start[env] = -1 if actions is None else length - len(actions)
            if actions is not None:
                self._actions[self._start[env] :, env] = actions

    def episode(self, env: int) -> NDArray[Any] | None:
        """Return a copy of the running episode's actions; None if some were dropped."""
        start = self._start[env]
        return None if start < 0 else self._actions[start : self._size, env].copy()

    def shortest_dropped(self, row_bytes: int) -> int:
        """Return the length from which an episode's first actions may have been dropped.

        `row_bytes`: upper bound of the bytes of one timestep's actions.
        """
        # Half of the log is dropped, once it has more than half of `max_bytes`.
        return self._max_bytes // (2 * row_bytes) // 2

    def _grow(self, action: NDArray[Any]) -> None:
        needed = max(0, min(self._start)) if self._size else 0
        if not self._size:
            self._actions = np.zeros((FIRST_CAPACITY, *action.shape), action.dtype)
        elif needed > self._size // 2:
            self._drop(needed)
        elif 2 * self._actions.nbytes <= self._max_bytes:
            self._actions = np.concatenate([self._actions, np.zeros_like(self._actions)])
        else:
            self._drop(max(1, self._size // 2))

    def _drop(self, count: int) -> None:
        self._actions[: self._size - count] = self._actions[count : self._size].copy()
        self._size -= count
        self._start = [max(-1, start - count) for start in self._start]
