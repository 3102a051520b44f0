"""Evaluation: episodes per environment, limits, confidence interval, equality of fused rollouts."""

from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from opened import job

from steadyrl.agents.base import Decision
from steadyrl.envs.types import Step
from steadyrl.loop import loop
from steadyrl.training.evaluation import evaluator as evaluation
from steadyrl.training.evaluation.evaluator import Evaluation, Evaluator
from steadyrl.training.evaluation.t_distribution import t_quantile
from steadyrl.training.run.collector import build_collector
from steadyrl.training.setup import build, open_run


class Scripted:
    """Vector environment that replays a list of steps."""

    def __init__(self, timesteps):
        self.rows, self.at, self.closed = timesteps, 0, False

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        self.at = 0

    def reset(self):
        self.episode_starts = np.ones(len(self.rows[0].valid), bool)
        self.observation = np.zeros((len(self.episode_starts), 1), np.float32)

    def step(self, action):
        step = self.rows[self.at]
        self.at += 1
        self.observation, self.episode_starts = step.obs, ~step.valid
        return step

    def close(self):
        self.closed = True


class Idle:
    def actor(self, num_envs, *, explore):
        assert explore is False
        return self

    def act(self, obs, episode_starts):
        assert episode_starts.dtype == bool and len(episode_starts) == len(obs)
        return Decision(torch.from_numpy(obs), torch.zeros(len(obs), dtype=torch.int64))


def step_of(reward, ended, valid):
    n = len(reward)
    bools = [np.array(x, bool) for x in (ended, valid)]
    none = np.zeros(n, bool)
    obs = np.zeros((n, 1), np.float32)
    return Step(obs, np.array(reward, np.float32), bools[0], none, bools[1], ())


def evaluate(monkeypatch, timesteps, *, episodes, num_envs=10, limit=1000, stopped=lambda: False):
    env = SimpleNamespace(for_evaluation=lambda: None)
    monkeypatch.setattr(evaluation, "build_env", lambda *a, **k: Scripted(timesteps))
    limits = SimpleNamespace(episodes=episodes, num_envs=num_envs, max_episode_steps=limit)
    return Evaluator(SimpleNamespace(env=env, eval=limits), seed=0).run(Idle(), stopped)


def test_every_environment_plays_the_same_number_of_episodes(monkeypatch):
    short = [(1.0, True, True), (0.0, False, False)] * 6
    long = [(10.0, False, True), (10.0, False, True), (10.0, True, True), (0, False, False)] * 3
    timesteps = [step_of(*zip(a, b, strict=True)) for a, b in zip(short, long, strict=True)]
    result = evaluate(monkeypatch, timesteps, episodes=4, num_envs=2)
    assert result.episodes == 4
    assert sorted(result.lengths) == [1, 1, 3, 3]
    assert result.mean == pytest.approx((1 + 1 + 30 + 30) / 4)


def test_cut_episodes_do_not_count(monkeypatch):
    timesteps = [
        step_of([5.0], [False], [True]),
        step_of([0.0], [False], [False]),  # the environment was rebuilt
        step_of([1.0], [False], [True]),
        step_of([1.0], [True], [True]),
    ]
    assert evaluate(monkeypatch, timesteps, episodes=1, num_envs=1).mean == 2.0


def test_endless_episodes_are_cut_at_the_step_limit(monkeypatch):
    timesteps = [step_of([1.0], [False], [True])] * 20
    result = evaluate(monkeypatch, timesteps, episodes=3, num_envs=1, limit=7)
    assert (result.mean, result.episodes, result.left_out) == (7.0, 1, 2)
    assert result.remark.startswith("1 of 3 episodes were played") and "num_envs=3" in result.remark


def test_one_environment_per_episode_counts_cut_episodes_too(monkeypatch):
    timesteps = [step_of([1.0] * 3, [False] * 3, [True] * 3)] * 20
    result = evaluate(monkeypatch, timesteps, episodes=3, num_envs=20, limit=7)
    assert (result.lengths, result.left_out, result.remark) == ((7, 7, 7), 0, "")


def test_evaluation_stops_on_request(monkeypatch):
    timesteps = [step_of([1.0] * 3, [False] * 3, [True] * 3)] * 20
    assert evaluate(monkeypatch, timesteps, episodes=3, stopped=lambda: True) is None


def test_the_interval_covers_the_mean_as_often_as_stated():
    random = np.random.default_rng(0)
    covered = []
    for returns in random.normal(3.0, 2.0, size=(4000, 5)):
        low, high = Evaluation(tuple(returns), ()).interval
        covered.append(low <= 3.0 <= high)
    assert np.mean(covered) == pytest.approx(0.95, abs=0.011)  # three standard errors
    assert Evaluation((1.0,), (1,)).interval is None


def test_the_interval_ends_at_a_bound_that_several_episodes_reach():
    """Of returns capped at 500 it is no wider than they can be, and covers their mean as often."""
    random = np.random.default_rng(0)
    samples = np.minimum(random.exponential(600.0, size=(4000, 10)), 500.0)
    mean = 600.0 * (1 - np.exp(-500 / 600))
    covered, beyond = [], []
    for returns in samples.tolist():
        low, high = Evaluation(tuple(returns), ()).interval
        half = t_quantile(9) * np.std(returns, ddof=1) / np.sqrt(10)
        covered.append((low <= mean <= high) == (abs(np.mean(returns) - mean) <= half))
        beyond.append(np.mean(returns) + half > 500.0)
        assert high <= 500.0 or returns.count(500.0) < 2
    assert all(covered) and sum(beyond) > 100


@pytest.mark.parametrize(
    ("returns", "interval"),
    [
        ((490.0, 500.0, 500.0), (482.3, 500.0)),
        ((9.0, 9.0, 10.0, 10.0), (9.0, 10.0)),
        ((500.0,) * 3, (500.0, 500.0)),
        ((480.0, 500.0), (362.94, 617.06)),  # nothing says that 500 is the most
    ],
)
def test_the_interval_of_few_returns(returns, interval):
    assert Evaluation(returns, ()).interval == pytest.approx(interval, abs=0.1)


PLAYED = {
    "q": ("env=cartpole", "agent=dqn"),
    "dueling stack": ("env=mountaincar", "agent=dqn", "agent.dueling=true", "env.frame_stack=2"),
    "discrete": ("env=acrobot", "agent=ppo", "agent.normalize_obs=true"),
    "gaussian": ("env=pendulum", "agent=ppo"),
    "units as they are": ("env=mountaincar_continuous", "agent=ppo", "agent.scale_actions=false"),
    "boards": ("env=minatar_breakout", "agent=ppo"),
    "boards of dqn": ("env=minatar_freeway", "agent=dqn"),
}


@pytest.mark.machinery
@pytest.mark.parametrize("limit", [60, 100_000])
@pytest.mark.parametrize("name", PLAYED)
def test_fused_evaluation_equals_step_by_step_evaluation(tmp_path, monkeypatch, name, limit):
    if name.startswith("boards"):
        pytest.importorskip("minatar")
    if name == "boards of dqn" and limit > 60:
        limit = 3000  # Freeway's episodes are long
    run_job = job(
        tmp_path,
        *PLAYED[name],
        "device=cpu",
        "eval.episodes=5",
        "eval.num_envs=3",
        f"eval.max_episode_steps={limit}",
        quick=False,
    )
    fused = []
    with (
        build(run_job) as (_, agent),
        closing(Evaluator(run_job.settings.run, seed=3)) as evaluator,
    ):
        actor = agent.actor(3, explore=False)
        expected = evaluator.play(StepByStep(actor), lambda: False)
        act_many = actor.act_many
        actor.act_many = lambda run, steps: fused.append(act_many(run, steps)) or fused[-1]
        for timesteps in (1, 1000):
            evaluator.env._max_timesteps = timesteps
            assert evaluator.play(actor, lambda: False) == expected
    assert expected.episodes == 5 or max(expected.lengths) >= limit
    assert fused


class StepByStep:
    """Actor without `act_many`."""

    def __init__(self, actor):
        self.act = actor.act


def test_scoring_fewer_episodes_than_configured_is_warned_of_once(tmp_path):
    run_job = job(
        tmp_path,
        "env=acrobot",
        "total_steps=400",
        "agent.compile=false",
        "eval.every=200",
        "eval.episodes=3",
        "eval.num_envs=2",
        "eval.max_episode_steps=5",
        quick=False,
    )
    with open_run(run_job) as (run, env, agent):
        loop(run, build_collector(run, env, agent))
    [line] = [
        r for r in (tmp_path / "run/train.log").read_text().splitlines() if "stops for good" in r
    ]
    assert "2 of 3 episodes were played" in line
