"""The actions of the episodes under way, kept so that a resumed run can play them again."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

FIRST_CAPACITY = 1024
MAX_BYTES = 32 * 2**20


class ActionLog:
    """Rows of actions [rows, N, …] back to the start of the oldest running episode.

    It grows by doubling to `max_bytes`; past that the oldest half is dropped, and an episode that
    began in it cannot be replayed.
    """

    def __init__(self, num_envs: int, max_bytes: int = MAX_BYTES) -> None:
        self._actions = np.zeros((0, num_envs))
        self._size = 0
        self._start = [0] * num_envs  # first row of each environment's episode; negative: dropped
        self._max_bytes = max_bytes

    def append(self, action: NDArray[Any]) -> None:
        """Keep one action per environment."""
        if self._size == len(self._actions):
            self._grow(action)
        self._actions[self._size] = action
        self._size += 1

    def begin_episode(self, env: int) -> None:
        """Say that the next action is the first of a new episode."""
        self._start[env] = self._size

    def clear(self) -> None:
        """Forget every action: all episodes begin now."""
        self._size = 0
        self._start = [0] * len(self._start)

    def load(self, episodes: list[NDArray[Any] | None]) -> None:
        """Take the actions of every episode under way; None marks one that cannot be replayed."""
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
        """Return a copy of the actions of the episode under way, None when some were dropped."""
        start = self._start[env]
        return None if start < 0 else self._actions[start : self._size, env].copy()

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
