"""Reference replay: complete transitions with stacked observations in Python lists."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
from synthetic_envs import Timestep


class Transition(NamedTuple):
    row: int
    obs: np.ndarray
    action: int
    reward: float
    discount: float
    next_obs: np.ndarray


class NaiveReplay:
    """Keeps, per environment, the last `span` transitions that the ring buffer still has."""

    def __init__(self, num_envs: int, span: int, rows: int, n_step: int, gamma: float) -> None:
        self.envs, self.span, self.ring_size, self.n_step = num_envs, span, rows, n_step
        self.gamma = gamma
        self.stored: list[deque[Transition]] = [deque(maxlen=span) for _ in range(num_envs)]
        self.episode: list[list] = [
            [] for _ in range(num_envs)
        ]  # steps of incomplete n-step windows
        self.row = 0

    def start(self, obs: np.ndarray) -> None:
        if hasattr(self, "obs"):
            for env in range(self.envs):
                self._finish(env)
            self.row += 1
        self.obs = obs.copy()
        self._forget()

    def add(self, row: Timestep) -> None:
        for env in range(self.envs):
            if not row.valid[env]:
                self._finish(env)
                continue
            self.episode[env].append(
                (self.row, self.obs[env], row.action[env], row.reward[env], row.next_obs[env])
            )
            if row.terminated[env] or row.truncated[env]:
                self._finish(env, terminated=bool(row.terminated[env]))
            elif len(self.episode[env]) == self.n_step:
                self._emit(env, terminated=False)
        self.obs = row.next_obs.copy()
        self.row += 1
        self._forget()

    def _finish(self, env: int, *, terminated: bool = False) -> None:
        while self.episode[env]:
            self._emit(env, terminated=terminated)

    def _emit(self, env: int, *, terminated: bool) -> None:
        window = self.episode[env]
        row, obs, action, _, _ = window[0]
        total = 0.0
        for k, (_, _, _, reward, _) in enumerate(window):
            total += self.gamma**k * float(reward)
        discount = 0.0 if terminated else self.gamma ** len(window)
        transition = Transition(row, obs, int(action), total, discount, window[-1][4])
        self.stored[env].append(transition)
        window.pop(0)

    def _forget(self) -> None:
        # The ring has the last `ring_size` timesteps, and frame stacks reach back: transitions
        # older than span + n_step - 1 timesteps are dropped.
        for stored in self.stored:
            while stored and self.row - stored[0].row > self.span + self.n_step - 1:
                stored.popleft()

    def by_id(self) -> dict[int, Transition]:
        return {
            (transition.row % self.ring_size) * self.envs + env: transition
            for env, stored in enumerate(self.stored)
            for transition in stored
        }
