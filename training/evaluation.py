"""Greedy episodes on environments and generators of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from agents.base import Agent
from envs.factory import build_env
from training.settings import RunSettings

MAX_ENVS = 10


class Evaluation(NamedTuple):
    """The returns of one evaluation."""

    mean: float
    std: float
    episodes: int


class Evaluator:
    """Play the same episodes at every evaluation, so that scores differ only by the policy."""

    def __init__(self, settings: RunSettings, *, seed: int) -> None:
        episodes = settings.eval.episodes
        envs = min(episodes, MAX_ENVS)
        # A fixed share for each environment: taking whichever episodes end first would favour
        # short ones.
        self._shares = [episodes // envs + (i < episodes % envs) for i in range(envs)]
        self._max_episode_steps = settings.eval.max_episode_steps
        self._env = build_env(
            settings.env.for_evaluation(), seed=seed, num_envs=envs, purpose="evaluation"
        )
        self._start = self._env.state_dict()

    def run(self, agent: Agent, stopped: Callable[[], bool]) -> Evaluation | None:
        """Return the agent's greedy score, or None when stopped before it is known."""
        self._env.load_state_dict(self._start)
        self._env.reset()
        actor = agent.actor(len(self._shares), explore=False)
        left = np.array(self._shares)
        running = np.zeros(len(left))
        length = np.zeros(len(left), dtype=np.int64)
        returns: list[float] = []
        while left.any():
            if stopped():
                return None
            decision = actor.act(self._env.observation, self._env.starts)
            step = self._env.step(decision.action.numpy(force=True))
            # An invalid row begins an episode, also where a broken environment lost one.
            running = np.where(step.valid, running + step.reward, 0)
            length = np.where(step.valid, length + 1, 0)
            over = step.terminated | step.truncated
            # A policy may walk in circles where no time limit ends the episode: what it has
            # by then counts, and its environment plays no further.
            stuck = (length >= self._max_episode_steps) & ~over & (left > 0)
            returns += running[(over | stuck) & (left > 0)].tolist()
            left = np.where(stuck, 0, np.maximum(left - over, 0))
        return Evaluation(float(np.mean(returns)), float(np.std(returns)), len(returns))

    def close(self) -> None:
        """Close the environments."""
        self._env.close()
