"""Environments whose episodes never end log their rewards, also over interruptions."""

import json

import numpy as np
import pytest
from logged_runs import Lines, opened, train
from opened import job
from toy_environments import settings

from steadyrl import loop
from steadyrl.envs.factory import build_env
from steadyrl.training.run.collector import build_collector
from steadyrl.training.setup import build

ENDLESS = ("env.id=endless_env:Endless-v0", "eval.every=0", "total_steps=100", "log.every=20")
MEANS = {20: 10.5, 40: 30.5, 60: 50.5, 80: 70.5, 100: 90.5}  # the reward of step t is t


@pytest.mark.parametrize("agent", [("agent=dqn",), ("agent=ppo", "agent.rollout_steps=32")])
def test_the_mean_reward_of_each_interval_is_logged(tmp_path, agent):
    loop.train(job(tmp_path, *ENDLESS, *agent, "agent.compile=false", quick=False))
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert {line["step"]: line["rollout/reward_mean"] for line in lines} == MEANS


@pytest.mark.parametrize("at", [50, 60])
def test_a_step_that_an_interruption_left_pending_counts_once(tmp_path, at):
    """At step 50 only updates are due, at 60 a log line too; the step after it is pending."""
    run_job, lines = (
        job(tmp_path, *ENDLESS, "agent.learning_starts=20", "agent.train_every=1"),
        Lines(),
    )
    with build(run_job) as (env, agent):
        env.reset()
        first = opened(run_job, agent, lines)
        train(first, env, agent, at)
        stop = first._services.signals.stop
        agent.set_stop_flag(stop)
        stop.commit()
        assert build_collector(first, env, agent).collect() is None
        assert first.event_due == (at == 60) and env.total_reward > at * (at + 1) / 2
        states = [each.state_dict() for each in (first, agent, env)]
    with build(run_job) as (env, agent):
        second = opened(run_job, agent, lines)
        for each, state in zip((second, agent, env), states, strict=True):
            each.load_state_dict(state)
        train(second, env, agent, 100)
        second.complete()
    assert {step: values["rollout/reward_mean"] for step, values, *_ in lines} == MEANS


@pytest.mark.parametrize("before", ["sync", "async", "batch", "kernel"])
@pytest.mark.parametrize("after", ["sync", "kernel"])
def test_rewards_of_episodes_that_cannot_go_on_are_counted(before, after):
    random, received = np.random.default_rng(0), 0.0
    one, other = (settings("CartPole-v1", num_envs=3, backend=each) for each in (before, after))
    with build_env(one, seed=0) as saved, build_env(other, seed=0) as env:
        saved.reset()
        for each in (saved, env):
            for _ in range(30):
                received += float(each.step(random.integers(0, 2, 3)).reward.sum())
                assert each.total_reward == received
            env.load_state_dict(saved.state_dict())
            assert env.total_reward == saved.total_reward
