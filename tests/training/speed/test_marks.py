"""The collector gives every second of a timestep to its part; callbacks count their own."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from steadyrl.agents.base import Decision
from steadyrl.envs.types import BlockResult
from steadyrl.training.callbacks.callback import Callback
from steadyrl.training.callbacks.runner import Callbacks
from steadyrl.training.run.collector import BlockCollector, StepCollector
from steadyrl.training.speed.part_times import PartTimes

PLACES = ("training.run.collector", "training.speed.part_times", "training.callbacks.runner")


TAKES = {"act": 1, "evaluate_and_log": 1000, "send": 2, "update": 4, "receive": 8,
         "sync_ranks": 100, "observe": 100, "collect_block": 16, "on_step": 32}  # fmt: skip


class Clock:
    """Seconds that pass only in calls: each call takes as long as its name says."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        for place in PLACES:
            monkeypatch.setattr(f"steadyrl.{place}.perf_counter", lambda: self.now)

    def taking(self, name, result=None):
        def call(*arguments):
            self.now += TAKES[name]
            return result

        return call


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def run_once(clock, kind, *, overlaps, event_due=False, block=None, metrics=None):
    """Return the part times of a run after one call of a collector."""
    decision = Decision(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64))
    step = SimpleNamespace(episodes=[], valid=np.ones(1, bool))
    run = SimpleNamespace(
        part_times=PartTimes(), event_due=event_due, cut_short=False, steps_until_next_event=9,
        best_unsaved=False,
        evaluate_and_log=clock.taking("evaluate_and_log"), sync_ranks=clock.taking("sync_ranks", 1),
    )  # fmt: skip
    env = SimpleNamespace(
        observation=None, episode_starts=None, step_many=None, spec=SimpleNamespace(id="Env-v0"),
        send=clock.taking("send"), receive=clock.taking("receive", step),
    )  # fmt: skip
    agent = SimpleNamespace(
        can_update_during_step=overlaps, has_pending_updates=False, updates=1,
        update=clock.taking("update", metrics),
        observe=clock.taking("observe"), collect_block=clock.taking("collect_block", block),
    )  # fmt: skip
    actor = SimpleNamespace(act=clock.taking("act", decision))
    assert kind(run, env, agent, actor).collect() is not None
    return run.part_times


def collected(clock, kind, **options):
    """Return the seconds by part after one call of a collector."""
    times = run_once(clock, kind, **options)
    return times.act, times.environment, times.update


@pytest.mark.parametrize("event_due", [False, True])
@pytest.mark.parametrize("overlaps", [False, True])
def test_a_timestep_is_acting_environment_and_update(clock, overlaps, event_due):
    times = collected(clock, StepCollector, overlaps=overlaps, event_due=event_due)
    assert times == (1, 2 + 8, 4)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(("kind", "block"), [(StepCollector, None), (BlockCollector, (5, ()))])
def test_every_update_and_the_collecting_before_it_are_reported(clock, kind, block, overlaps):
    block = block and BlockResult(*block)
    times = run_once(clock, kind, overlaps=overlaps, block=block, metrics={})
    collecting = 1 + 2 + (0 if overlaps else 16 if block else 8)
    assert times.means() == {"time/step_ms": 4000, "time/collect_ms": 1000 * collecting}


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_block_is_environment(clock, overlaps):
    block = BlockResult(5, ())
    times = collected(clock, BlockCollector, overlaps=overlaps, block=block)
    assert times == (1, 2 + 16, 4)


def test_an_agent_without_a_block_takes_a_timestep(clock):
    times = collected(clock, BlockCollector, overlaps=True, block=None)
    assert times == (1, 2 + 16 + 8, 4)


def test_callbacks_count_their_seconds(clock):
    callback = Callback()
    callback.on_step = clock.taking("on_step")
    callbacks = Callbacks([callback], SimpleNamespace(stop_reason=None))
    callbacks.notify("on_step", 7)
    callbacks.notify("on_step", 8)
    assert callbacks.seconds == 64
