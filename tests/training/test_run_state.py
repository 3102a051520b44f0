"""A run that is continued from its state tells the same story as one that never stopped."""

from types import SimpleNamespace

import pytest
from opened import job

from train import loop
from training.evaluation import Evaluation
from training.instruments import Instruments
from training.opening import build
from training.run import Run
from training.summary import Summary
from training.timing import Interval, Pace, Stopwatch

DQN = ("total_steps=1600", "log.every=130", "eval.every=400", "env.num_envs=3")
PPO = (
    "agent=ppo",
    "device=cpu",
    "total_steps=1600",
    "log.every=130",
    "eval.every=400",
    "agent.rollout_steps=64",
    "agent.epochs=2",
    "agent.minibatches=1",
)


class Lines(list):
    def write(self, step, scalars, wall_seconds, episodes, returns):
        timeless = {
            tag: value for tag, value in scalars.items() if not tag.startswith(("time/", "memory/"))
        }
        self.append((step, timeless, episodes, returns))


class Played:
    """An evaluator whose score tells how much was learned."""

    def run(self, agent, stopped):
        return Evaluation((float(-agent.updates),) * 3, (9,) * 3)


def opened(job, agent, lines):
    """Return a run that writes to a list."""
    nothing = SimpleNamespace(
        on_update=lambda count: None,
        on_rollout=lambda: None,
        on_episodes=lambda count: None,
        measure=lambda step: {"memory/rss_mb": 0.0},
        refuse_lost=lambda: None,
        show=lambda status: None,
        received=None,
        after_row=lambda step, score, best, asked: None,
        save_requested=False,
        reached=lambda: None,
        write_policy=lambda name, step, score: None,
        finish=lambda step, score: None,
        next=None,
        shoot=lambda agent, step, stopped: None,
        continue_at=lambda step: None,
    )
    instruments = Instruments(nothing, lines, nothing, Played(), *[nothing] * 4)
    return Run(job.settings, agent, instruments, Summary("failed", "", "", "", 0))


class Part:
    """A run up to some step, as the loop sees it."""

    def __init__(self, run, until):
        self.run, self.until = run, until
        self.record, self.report, self.kept = run.record, run.report, run.kept
        self.agree = run.agree
        self.stopped = False

    @property
    def done(self):
        return self.run.steps >= self.until

    @property
    def due(self):
        return self.run.due


def train(run, env, agent, until):
    """Go on to some step."""
    loop(Part(run, until), env, agent, agent.actor(env.spec.num_envs, explore=True))


@pytest.mark.parametrize(("overrides", "quick"), [(DQN, True), (PPO, False)], ids=["dqn", "ppo"])
@pytest.mark.parametrize("cut", [390, 777])
def test_the_lines_after_a_cut_are_those_of_an_uninterrupted_run(tmp_path, overrides, quick, cut):
    told = job(tmp_path, *overrides, quick=quick)
    whole, parts = Lines(), Lines()
    with build(told) as (env, agent):
        env.reset()
        run = opened(told, agent, whole)
        train(run, env, agent, 1600)
        run.finish()
    with build(told) as (env, agent):
        env.reset()
        first = opened(told, agent, parts)
        train(first, env, agent, cut)
        states = [each.state_dict() for each in (first, agent, env)]
    with build(told) as (env, agent):
        second = opened(told, agent, parts)
        for each, state in zip((second, agent, env), states, strict=True):
            each.load_state_dict(state)
        train(second, env, agent, 1600)
        second.finish()
    assert len(whole) >= 12
    assert parts == whole
    for key in ("steps", "updates", "episodes", "return_mean", "weights_sha256"):
        assert getattr(second.summary, key) == getattr(run.summary, key)
    for key in ("eval_return_mean", "best_eval_return_mean", "eval_episodes"):
        assert getattr(second.summary, key) == getattr(run.summary, key)


def test_a_stopwatch_goes_on_where_it_was():
    first = Stopwatch()
    first.load_state_dict({"seconds": 1000.0, "paused": 100.0})
    with first.pause():
        pass
    second = Stopwatch()
    second.load_state_dict(first.state_dict())
    assert 1000 <= second.seconds < 1100
    assert 900 <= second.training <= second.seconds - 100


@pytest.mark.parametrize(("every", "next_"), [(10, 40), (7, 42), (40, 40), (100, 100), (0, None)])
def test_an_interval_that_was_changed_counts_on(every, next_):
    saved = Interval(10)
    assert saved.due(35)
    interval = Interval(every)
    interval.load_state_dict(saved.state_dict())
    assert interval.next == next_


def test_a_run_that_logs_without_end_slows_down_and_forgets_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("training.run.Pace", lambda: Pace(at_once=5))
    told = job(tmp_path, "total_steps=1600", "log.every=8", "eval.every=400")
    lines = Lines()
    with build(told) as (env, agent):
        env.reset()
        run = opened(told, agent, lines)
        train(run, env, agent, 1600)
        run.finish()
    logged = [line for line in lines if "rollout/return_mean" in line[1]]
    assert len(logged) <= 5 + run.summary.wall_seconds + 1
    assert [step for step, values, *_ in lines if "eval/return_mean" in values] == [
        400,
        800,
        1200,
        1600,
    ]
    assert lines[-1][0] == 1600 and lines[-1] in logged
