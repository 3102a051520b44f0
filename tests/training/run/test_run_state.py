"""A run resumed from its state logs the same as an uninterrupted one."""

import json

import pytest
from algorithms import NAMES, eager, small
from logged_runs import Lines, opened, run_in_two_parts, train
from opened import job

from steadyrl.core.clock import Interval, RateLimiter, Stopwatch
from steadyrl.loop import train as run_training
from steadyrl.training.setup import build

RUN = ("total_steps=1600", "log.every=130", "eval.every=400", "env.num_envs=3", "device=cpu")


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_logs_the_same_as_an_uninterrupted_one(tmp_path, name):
    run_job, uninterrupted = (
        job(tmp_path, *RUN, *eager(name), *small(name).short, quick=False),
        Lines(),
    )
    with build(run_job) as (env, agent):
        env.reset()
        run = opened(run_job, agent, uninterrupted)
        train(run, env, agent, 1600)
        run.complete()
    assert len(uninterrupted) >= 12
    for cut in (390, 777):
        parts = Lines()
        summary = run_in_two_parts(run_job, cut, 1600, parts).summary
        assert parts == uninterrupted
        for key in ("steps", "updates", "episodes", "return_mean", "weights_sha256"):
            assert getattr(summary, key) == getattr(run.summary, key)
        for key in ("eval_return_mean", "best_eval_return_mean", "eval_episodes"):
            assert getattr(summary, key) == getattr(run.summary, key)


def test_evaluations_say_whether_they_are_early(tmp_path, caplog):
    caplog.set_level("INFO", "steadyrl")
    run_job = job(tmp_path, "total_steps=6000", "eval.every=100", "agent.learning_starts=250")
    with build(run_job) as (env, agent):
        env.reset()
        train(opened(run_job, agent, Lines()), env, agent, 700)
    said = [line for line in caplog.messages if line.startswith("evaluation at step ")]
    heads = [line.removeprefix("evaluation at step ").partition(":")[0] for line in said]
    assert said and all(" (std) over " in line for line in said)
    assert heads[:2] == ["100 (untrained)", "200 (untrained)"]
    assert "300 (early" in said[2] and "5% of the steps)" in said[2]
    assert heads[-1] == "600"


@pytest.mark.parametrize(("total", "trains"), [(104, True), (103, False), (100, False)])
def test_a_run_that_ends_before_it_learns_says_so(tmp_path, capfd, total, trains):
    run_job = job(tmp_path, f"total_steps={total}", "agent.learning_starts=100", "eval.every=0")
    run_training(run_job)
    begins = "learning begins at step 104 (agent.learning_starts=100, train_every=8)"
    ends = f"nothing will be learned: the run ends at step {total}, {begins}"
    assert (ends in capfd.readouterr().out) is not trains
    run_training(job(tmp_path, f"resume={tmp_path / 'run'}", quick=False))
    assert "will be learned" not in capfd.readouterr().out


def test_a_window_that_an_episode_may_end_begins_at_the_latest(tmp_path, capfd):
    long = ("total_steps=300", "agent.learning_starts=50", "agent.n_step=400", "eval.every=0")
    result = run_training(job(tmp_path, *long))
    out = capfd.readouterr().out
    assert (
        "perhaps nothing will be learned: the run ends at step 300, learning begins at step " in out
    )
    assert " at the latest (no sample is complete before, unless an episode ends: agent.n_s" in out
    assert result.summary.updates > 0


def test_timesteps_that_reset_begin_learning_earlier_than_a_rollout_of_steps(tmp_path, capfd):
    ppo = ("agent=ppo", "env.id=odd_actions:Odd-v0", "env.num_envs=1", "agent.rollout_steps=210")
    rest = ("total_steps=210", "eval.every=0", "log.every=5", "device=cpu")
    result = run_training(job(tmp_path, *ppo, *rest, quick=False))
    assert "learning begins at step 210 at the latest (first rollout: 210" in capfd.readouterr().out
    assert result.summary.updates > 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert min(row["step"] for row in rows if "train/loss" in row) < 210


def test_a_restored_stopwatch_continues():
    first = Stopwatch()
    first.load_state_dict({**first.state_dict(), "seconds": 1000.0, "paused": 100.0})
    with first.pause():
        pass
    second = Stopwatch()
    second.load_state_dict(first.state_dict())
    assert 1000 <= second.seconds < 1100
    assert 900 <= second.training <= second.seconds - 100


@pytest.mark.parametrize(("every", "next_"), [(10, 40), (7, 42), (40, 40), (100, 100), (0, None)])
def test_a_restored_interval_keeps_its_phase(every, next_):
    saved = Interval(10)
    assert saved.pop_due(35)
    interval = Interval(every)
    interval.load_state_dict(saved.state_dict())
    assert interval.next == next_


def test_frequent_logging_is_rate_limited_except_for_evaluations(tmp_path, monkeypatch):
    monkeypatch.setattr("steadyrl.core.clock.RateLimiter", lambda: RateLimiter(burst=5))
    run_job = job(tmp_path, "total_steps=1600", "log.every=8", "eval.every=400")
    lines = Lines()
    with build(run_job) as (env, agent):
        env.reset()
        run = opened(run_job, agent, lines)
        train(run, env, agent, 1600)
        run.complete()
    logged = [line for line in lines if "rollout/return_mean" in line[1]]
    assert len(logged) <= 5 + run.summary.wall_seconds + 1
    assert [step for step, values, *_ in lines if "eval/return_mean" in values] == [
        400,
        800,
        1200,
        1600,
    ]
    assert lines[-1][0] == 1600 and lines[-1] in logged
