"""Runs that log to a list, trained to a given step."""

from types import SimpleNamespace

from scripts.benchmarks.measuring import BlocksUntil
from steadyrl.agents.learner.comm import SINGLE_PROCESS
from steadyrl.agents.learner.interrupt import Stop
from steadyrl.memory.watch import Peaks
from steadyrl.training.checkpoints.summary import Summary
from steadyrl.training.evaluation.evaluator import Evaluation
from steadyrl.training.mirror.mirror import NO_MIRROR
from steadyrl.training.run.collector import build_collector
from steadyrl.training.run.run import Run
from steadyrl.training.run.services import RunServices
from steadyrl.training.setup import build


class Lines(list):
    def write(self, step, scalars, wall_seconds, episodes, returns):
        timeless = {
            tag: value
            for tag, value in scalars.items()
            if tag == "memory/replay_fill" or not tag.startswith(("time/", "memory/"))
        }
        self.append((step, timeless, episodes, returns))


class Played:
    """Evaluator whose score depends on the number of updates."""

    def run(self, agent, stopped):
        return Evaluation((float(-agent.updates),) * 3, (9,) * 3)


def opened(job, agent, lines):
    """Return a run that logs to a list."""
    nothing = SimpleNamespace(
        on_update=lambda count: None,
        on_rollout=lambda: None,
        check=lambda: None,
        pop_save_request=lambda: False,
        on_episodes=lambda count: None,
        cleaned=(0, 0.0),
        peaks=lambda exact: Peaks(0, None),
        nearest_limit=lambda: None,
        measure=lambda step: {"memory/rss_mb": 0.0},
        validate_exists=lambda: None,
        report=lambda step, scalars: None,
        on_steps=lambda step, updates: None,
        received=None,
        stop=Stop(),
        after_step=lambda step, score, best, requested: None,
        save_requested=False,
        on_timestep=lambda **_: None,
        reinstall=bool,
        cancel_timeout=lambda: None,
        write_policy=lambda name, step, score: None,
        finish=lambda step, score, changed: None,
        next=None,
        profile=lambda blocks: None,
        maybe_record=lambda agent, step, stopped: None,
        maybe_write=lambda step: None,
        continue_at=lambda step: None,
    )
    services = RunServices(
        *(nothing, lines, nothing, Played(), *[nothing] * 5),
        comm=SINGLE_PROCESS,
        callbacks=(),
        mirror=NO_MIRROR,
    )
    return Run(job.settings, agent, services, Summary("failed", "", "", "", 0))


def train(run, env, agent, until):
    """Train until step `until`."""
    collector = build_collector(run, env, agent)
    collector.finish_pending_step()
    collector.run = BlocksUntil(run, until)
    while run.steps < until:
        run.on_steps(collector.collect())


def uninterrupted_and_resumed(job, saved_at):
    """Return a run of 300 steps, one resumed at `saved_at`, and the metrics of both."""
    whole, parts = Lines(), Lines()
    with build(job) as (env, agent):
        env.reset()
        one = opened(job, agent, whole)
        train(one, env, agent, 300)
        one.complete()
    return one, run_in_two_parts(job, saved_at, 300, parts), whole, parts


def run_in_two_parts(job, saved_at, until, lines):
    """Return a run that was saved at step `saved_at` and resumed by another."""
    with build(job) as (env, agent):
        env.reset()
        first = opened(job, agent, lines)
        train(first, env, agent, saved_at)
        states = [each.state_dict() for each in (first, agent, env)]
    with build(job) as (env, agent):
        second = opened(job, agent, lines)
        for each, state in zip((second, agent, env), states, strict=True):
            each.load_state_dict(state)
        train(second, env, agent, until)
        second.complete()
    return second
