"""Save and restore environments by seeding the episode under way again and redoing its actions."""

from __future__ import annotations

import logging
from abc import abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs.action_log import ActionLog
from envs.lockstep import LockstepEnv
from envs.rows import Rows
from envs.types import EnvSpec, Step

LOG = logging.getLogger("steadyrl")


class ReplayableEnv(LockstepEnv):
    """A vector environment whose episodes each have a seed of their own."""

    def __init__(self, spec: EnvSpec, rows: tuple[Rows, Rows] | None = None) -> None:
        super().__init__(spec, rows)
        self._actions = ActionLog(spec.num_envs)

    def reset(self) -> NDArray[Any]:
        """Start every environment anew and return the first observations [N, …]."""
        self._actions.clear()
        return super().reset()

    def send(self, action: NDArray[Any]) -> None:
        """Hand one action per environment over; rows that reset ignore theirs."""
        super().send(action)
        self._actions.append(action)

    def receive(self) -> Step:
        """Return the row that the last `send` led to."""
        step = super().receive()
        if not self._rows[self._turn].is_ordinary():
            for env in np.flatnonzero(~step.valid).tolist():
                self._actions.begin_episode(env)
        return step

    def state_dict(self) -> dict[str, Any]:
        """Return the plain state: episodes, the actions of those under way, statistics."""
        import torch  # here, so that a configuration is checked without it

        if self._under_way:
            raise RuntimeError("the state is whole between receive() and send() only")
        envs = range(self.spec.num_envs)
        progress = [self._progress(env) for env in envs]
        actions = {str(env): self._actions.episode(env) for env in envs} if self._started else {}
        return {
            "steps": self.steps,
            "started": self._started,
            "seed": self._seed,
            "episode": [episode for episode, _ in progress],
            "over": [over for _, over in progress],
            "actions": {env: torch.from_numpy(a) for env, a in actions.items() if a is not None},
            "obs": torch.from_numpy(self.observation.copy()),
            "statistics": self._statistics.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave, replaying the episodes under way."""
        if len(state["episode"]) != self.spec.num_envs:
            raise ValueError(
                f"the state is of {len(state['episode'])} environments, there are "
                f"{self.spec.num_envs}"
            )
        self.steps, self._started, self._seed = state["steps"], state["started"], state["seed"]
        self._under_way = False
        self._statistics.load_state_dict(state["statistics"])
        saved = (state["actions"].get(str(env)) for env in range(self.spec.num_envs))
        actions = [None if a is None else a.numpy() for a in saved]
        self._actions.load(actions)
        rows = self._next()
        if self._started:
            self._replay_all(state["episode"], actions, rows)
        obs = state["obs"].numpy()
        for env, (episode, over) in enumerate(zip(state["episode"], state["over"], strict=True)):
            replayed = actions[env] is not None and self._progress(env) == (episode, over)
            if replayed and np.array_equal(rows.obs[env], obs[env]):
                continue
            self._actions.lose(env)
            self._cut(env, episode)
            if self._started:
                LOG.warning(
                    "environment %d cannot continue episode %d: it starts the next one",
                    env,
                    episode,
                )
        rows.obs[...] = obs

    _seed: int

    @abstractmethod
    def _progress(self, env: int) -> tuple[int, bool]:
        """Return the number of the episode under way and whether the next row is a reset."""

    @abstractmethod
    def _replay_all(
        self, episodes: list[int], actions: list[NDArray[Any] | None], rows: Rows
    ) -> None:
        """Replay every episode whose actions are known, writing its last frame."""

    @abstractmethod
    def _cut(self, env: int, episode: int) -> None:
        """Let the next row of an environment be a reset that starts the episode after this one."""
