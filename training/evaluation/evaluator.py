"""Evaluation episodes of the greedy policy, on environments of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from steadyrl.agents.actors.greedy import GreedyActor
from steadyrl.agents.base import Actor, Agent
from steadyrl.core.clock import doing, report_progress
from steadyrl.envs.factory import build_env
from steadyrl.envs.types import BlockResult, Step
from steadyrl.envs.vector import VectorEnv
from steadyrl.training.config.settings import RunSettings
from steadyrl.training.evaluation.t_distribution import t_quantile

EARLY = 0.1  # of the steps, at which scores say little about the run


class Evaluation(NamedTuple):
    """Returns and lengths of the episodes of one evaluation."""

    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    left_out: int = 0  # episodes not played: their environment hit eval.max_episode_steps

    @property
    def episodes(self) -> int:
        """Number of episodes."""
        return len(self.returns)

    @property
    def remark(self) -> str:
        """Why fewer episodes than requested were played; "" if all were."""
        if not self.left_out:
            return ""
        asked = self.episodes + self.left_out
        return (
            f"{self.episodes} of {asked} episodes were played: an environment stops for good at"
            f" eval.max_episode_steps; eval.num_envs={asked} gives each episode its own environment"
        )

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(np.mean(self.returns))

    @property
    def std(self) -> float:
        """Standard deviation of the returns."""
        return float(np.std(self.returns))

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % confidence interval of the mean (Student's t); None for one episode.

        It ends at the highest (lowest) return if several episodes have it: that is the most (least)
        that the environment gives, such as CartPole's 500.
        """
        n, returns = self.episodes, self.returns
        if n < 2:
            return None
        half = t_quantile(n - 1) * float(np.std(returns, ddof=1)) / math.sqrt(n)
        low, high = self.mean - half, self.mean + half
        least, most = min(returns), max(returns)
        return (
            max(low, least) if returns.count(least) > 1 else low,
            min(high, most) if returns.count(most) > 1 else high,
        )


def how_early(step: int, total: int, updates: int) -> str:
    """Return what a score says little about: an untrained policy, or the first tenth."""
    if not updates:
        return " (untrained)"
    return f" (early: {100 * step / total:.0f}% of the steps)" if step < EARLY * total else ""


class EvaluationCounter:
    """Counts a fixed number of episodes per environment.

    Counting whichever episodes end first would be biased towards short ones.
    """

    def __init__(self, episodes_per_env: Sequence[int], max_episode_steps: int) -> None:
        self._left = np.array(episodes_per_env)
        self._asked = int(self._left.sum())
        self._most = max_episode_steps
        self._running = np.zeros(len(episodes_per_env))
        self._length = np.zeros(len(episodes_per_env), dtype=np.int64)
        self._returns: list[float] = []
        self._lengths: list[int] = []

    @property
    def complete(self) -> bool:
        """Whether every environment has played its episodes."""
        return not self._left.any()

    @property
    def played(self) -> int:
        """Episodes counted so far."""
        return len(self._returns)

    @property
    def steps_left(self) -> int:
        """Steps until a counted episode may reach the limit on its length."""
        return self._most - int(self._length[self._left > 0].max())

    def add(self, step: Step) -> None:
        """Add one timestep of all environments."""
        # An invalid step starts an episode, also after an environment failure dropped one.
        self._running = np.where(step.valid, self._running + step.reward, 0)
        self._length = np.where(step.valid, self._length + 1, 0)
        self._end_episodes(step.terminated | step.truncated)

    def add_block(
        self, block: BlockResult, running: NDArray[np.float64], length: NDArray[np.int64]
    ) -> None:
        """Add a block of timesteps; `running`, `length` [N]: the episodes in progress after it."""
        for _, episode in block.episodes:
            self._count(episode.env, episode.return_, episode.length)
        self._running, self._length = running, length
        self._end_episodes(np.zeros(len(length), dtype=bool))

    def result(self) -> Evaluation:
        """Return the counted episodes."""
        left_out = self._asked - len(self._returns)
        return Evaluation(tuple(self._returns), tuple(self._lengths), left_out)

    def _end_episodes(self, over: NDArray[np.bool_]) -> None:
        # Without a time limit, a policy may loop for ever. At the limit its return so far counts,
        # and the environment plays no further episode.
        stuck = self._length >= self._most
        for env in np.flatnonzero(over | stuck).tolist():
            self._count(env, self._running[env], self._length[env])
            if not over[env]:
                self._left[env] = 0

    def _count(self, env: int, score: float, length: int) -> None:
        if self._left[env] > 0:
            self._left[env] -= 1
            self._returns.append(float(score))
            self._lengths.append(int(length))


def play(
    env: VectorEnv,
    actor: Actor,
    episodes_per_env: Sequence[int],
    *,
    max_episode_steps: int,
    stopped: Callable[[], bool],
) -> Evaluation | None:
    """Play that many episodes per environment; return None if stopped before the end."""
    env.reset()
    counter = EvaluationCounter(episodes_per_env, max_episode_steps)
    act_many, played = actor.act_many if isinstance(actor, GreedyActor) else None, 0
    while not counter.complete:
        if stopped():
            return None
        if counter.played > played:
            played = counter.played
            report_progress(f"{played:,} played")
        action = actor.act(env.observation, env.episode_starts).env_action.numpy(force=True)
        if act_many is None:
            counter.add(env.step(action))
            continue
        env.send(action)
        if (step_many := env.step_many) is None:
            counter.add(env.receive())
        else:
            counter.add_block(act_many(step_many, counter.steps_left), *env.running_episodes)
    return counter.result()


class Evaluator:
    """Plays the same episodes at every evaluation, so scores differ only by the policy."""

    def __init__(self, settings: RunSettings, *, seed: int) -> None:
        episodes = settings.eval.episodes
        self.num_envs = envs = min(episodes, settings.eval.num_envs)
        self._episodes_per_env = [episodes // envs + (i < episodes % envs) for i in range(envs)]
        self._max_episode_steps = settings.eval.max_episode_steps
        self.env = build_env(
            settings.env.for_evaluation(), seed=seed, num_envs=envs, purpose="evaluation"
        )
        self._start = self.env.state_dict()

    def run(self, agent: Agent, stopped: Callable[[], bool]) -> Evaluation | None:
        """Evaluate the agent's greedy policy; return None if stopped before the end."""
        return self.play(agent.actor(self.num_envs, explore=False), stopped)

    def play(self, actor: Actor, stopped: Callable[[], bool]) -> Evaluation | None:
        """Evaluate an actor; return None if stopped before the end."""
        limit, episodes = self._max_episode_steps, self._episodes_per_env
        with doing(f"evaluating ({sum(episodes)} episodes)"):
            self.env.load_state_dict(self._start)
            return play(self.env, actor, episodes, max_episode_steps=limit, stopped=stopped)

    def close(self) -> None:
        """Close the environments."""
        self.env.close()
