"""Episodes that are scored: greedy ones during training, on environments of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from agents.base import Actor, Agent
from envs.factory import build_env
from envs.types import EnvSpec
from envs.vector import VectorEnv
from training.estimates import student
from training.settings import RunSettings

MAX_ENVS = 10


class Evaluation(NamedTuple):
    """The returns and lengths of the episodes of one evaluation."""

    returns: tuple[float, ...]
    lengths: tuple[int, ...]

    @property
    def episodes(self) -> int:
        """How many there are."""
        return len(self.returns)

    @property
    def mean(self) -> float:
        """The score."""
        return float(np.mean(self.returns))

    @property
    def std(self) -> float:
        """How far the episodes are from each other."""
        return float(np.std(self.returns))

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % confidence interval of the mean (Student's t); of one episode there is none."""
        n = self.episodes
        if n < 2:
            return None
        half = student(n - 1) * float(np.std(self.returns, ddof=1)) / math.sqrt(n)
        return self.mean - half, self.mean + half


def play(
    env: VectorEnv,
    actor: Actor,
    shares: Sequence[int],
    *,
    max_episode_steps: int,
    stopped: Callable[[], bool],
) -> Evaluation | None:
    """Play a fixed share of episodes on each environment, or return None when stopped before.

    Taking whichever episodes end first would favour short ones.
    """
    env.reset()
    left = np.array(shares)
    running = np.zeros(len(left))
    length = np.zeros(len(left), dtype=np.int64)
    returns: list[float] = []
    lengths: list[int] = []
    while left.any():
        if stopped():
            return None
        decision = actor.act(env.observation, env.starts)
        step = env.step(decision.action.numpy(force=True))
        # An invalid row begins an episode, also where a broken environment lost one.
        running = np.where(step.valid, running + step.reward, 0)
        length = np.where(step.valid, length + 1, 0)
        over = step.terminated | step.truncated
        # A policy may walk in circles where no time limit ends the episode: what it has
        # by then counts, and its environment plays no further.
        stuck = (length >= max_episode_steps) & ~over & (left > 0)
        counts = (over | stuck) & (left > 0)
        returns += running[counts].tolist()
        lengths += length[counts].tolist()
        left = np.where(stuck, 0, np.maximum(left - over, 0))
    return Evaluation(tuple(returns), tuple(lengths))


class Evaluator:
    """Play the same episodes at every evaluation, so that scores differ only by the policy."""

    def __init__(self, settings: RunSettings, *, seed: int) -> None:
        episodes = settings.eval.episodes
        self.num_envs = envs = min(episodes, MAX_ENVS)
        self._shares = [episodes // envs + (i < episodes % envs) for i in range(envs)]
        self._max_episode_steps = settings.eval.max_episode_steps
        self._env = build_env(
            settings.env.for_evaluation(), seed=seed, num_envs=envs, purpose="evaluation"
        )
        self._start = self._env.state_dict()

    @property
    def spec(self) -> EnvSpec:
        """What its environments offer."""
        return self._env.spec

    def run(self, agent: Agent, stopped: Callable[[], bool]) -> Evaluation | None:
        """Return the agent's greedy score, or None when stopped before it is known."""
        return self.play(agent.actor(self.num_envs, explore=False), stopped)

    def play(self, actor: Actor, stopped: Callable[[], bool]) -> Evaluation | None:
        """Return the score of who decides, or None when stopped before it is known."""
        self._env.load_state_dict(self._start)
        limit = self._max_episode_steps
        return play(self._env, actor, self._shares, max_episode_steps=limit, stopped=stopped)

    def close(self) -> None:
        """Close the environments."""
        self._env.close()
