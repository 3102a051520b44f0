"""Samples are taken at updates after log lines, without pauses and compilation."""

from types import SimpleNamespace

import pytest

from steadyrl.core.clock import Activity, doing, shown_by
from steadyrl.memory.settings import SlowdownSettings
from steadyrl.training.checkpoints.summary import Summary
from steadyrl.training.speed.part_times import PartTimes
from steadyrl.training.speed.watch import SpeedWatch

SETTINGS = SlowdownSettings(max_percent=20, warmup_samples=5, window_samples=20)


class Trained:
    """A run on a clock of its own, with a log line and an update at every 1000 steps."""

    def __init__(self, *, warns=True):
        self.clock = SimpleNamespace(seconds=0.0, training=0.0)
        self.times, self.callbacks = PartTimes(), SimpleNamespace(seconds=0.0)
        self.watch = SpeedWatch(SETTINGS, self.times, self.callbacks, warns=warns)
        self.activity = Activity(lambda: self.clock.seconds)
        self.steps = self.updates = 0
        self.lines = []

    def go_on(self, seconds, *, updates=1, part="environment"):
        self.clock.seconds += seconds
        self.clock.training += seconds
        setattr(self.times, part, getattr(self.times, part) + seconds)
        self.steps += 1000
        speed = 1000 / seconds
        self.lines.append(self.watch.on_log(self.steps, speed, self.clock, {}))
        if updates:
            self.updates += updates
            self.watch.on_update(self.steps, self.updates, self.clock)

    def evaluate(self, seconds):
        self.activity.begin("evaluating")
        self.clock.seconds += seconds
        self.activity.end()


@pytest.fixture
def run():
    trained = Trained()
    with shown_by(trained.activity):
        yield trained


def test_a_slower_run_is_warned_of(run, caplog):
    for _ in range(30):
        run.go_on(2.0)
    assert caplog.messages == []
    for _ in range(30):
        run.go_on(4.0)
    [line] = caplog.messages
    assert "500 steps/s until step 30,000, 250 now (50% less" in line
    assert "environment 2 to 4 ms" in line


def test_one_rank_warns(caplog):
    run = Trained(warns=False)
    for seconds in [2.0] * 30 + [4.0] * 30:
        run.go_on(seconds)
    assert caplog.messages == []


def test_evaluations_and_compilation_are_no_slow_down(run, caplog):
    for k in range(90):
        if k > 30:
            run.evaluate(5.0)
            with doing("compiling"):
                run.clock.seconds += 5.0
                run.clock.training += 5.0
        run.go_on(2.0)
    assert caplog.messages == []


def test_the_first_update_begins_anew(run, caplog):
    """Steps without learning are fast: filling the replay."""
    for _ in range(40):
        run.go_on(1.0, updates=0)
    for _ in range(40):
        run.go_on(5.0)
    assert caplog.messages == []


def test_a_run_that_never_learns_is_watched_too(run, caplog):
    for seconds in [1.0] * 30 + [3.0] * 30:
        run.go_on(seconds, updates=0)
    assert len(caplog.messages) == 1


def test_rollouts_are_whole_in_a_sample(run, caplog):
    """An update every third log line takes ten times as long as the steps."""
    for k in range(200):
        if k % 3 == 0:
            run.clock.seconds += 20.0
            run.clock.training += 20.0
        run.go_on(2.0, updates=k % 3 == 0)
    assert caplog.messages == []
    summary = Summary("finished", "", "", "", 0)
    run.watch.fill(summary, run.clock)
    assert abs(summary.speed_trend_percent) < 1e-6


def test_parts_sum_to_the_time_of_a_step(run):
    run.times.act += 0.5
    run.go_on(2.0)
    run.go_on(4.0, part="update")
    assert run.lines[0] == {
        "time/environment_ms": 2.0, "time/act_ms": 0.5, "time/update_ms": 0.0, "time/other_ms": 0.0,
    }  # fmt: skip
    assert run.lines[1]["time/update_ms"] == 4.0 and run.lines[1]["time/act_ms"] == 0.0
    assert run.watch.on_log(run.steps, 0.0, run.clock, {}) == {}  # no steps since


def test_a_resumed_run_counts_from_its_last_line(run):
    run.go_on(2.0)
    restored = PartTimes()
    restored.load_state_dict(run.times.state_dict())
    restored.update += 3.0
    assert restored.milliseconds(2000, 250.0) == {
        "time/environment_ms": 0.0, "time/act_ms": 0.0, "time/update_ms": 3.0, "time/other_ms": 1.0,
    }  # fmt: skip


def test_fractions_sum_to_one(run):
    run.go_on(6.0)
    run.go_on(2.0, part="update")
    run.evaluate(1.0)
    run.clock.seconds += 1.0
    run.clock.training += 1.0
    summary = Summary("finished", "", "", "", 0)
    run.watch.fill(summary, run.clock)
    fractions = {name: getattr(summary, f"time_share_{name}")
              for name in ("environment", "act", "update", "evaluation", "other")}  # fmt: skip
    assert fractions == pytest.approx(
        {"environment": 0.6, "act": 0.0, "update": 0.2, "evaluation": 0.1, "other": 0.1}
    )


def test_evaluations_that_take_most_of_the_time_are_warned_of_once(run, caplog):
    for _ in range(30):
        run.go_on(10.0)
        run.evaluate(9.0)
    assert caplog.messages == []
    for _ in range(60):
        run.go_on(10.0)
        run.evaluate(20.0)
    [line] = [message for message in caplog.messages if "eval.every" in message]
    assert "take 5" in line and "% of the time so far" in line


def test_a_short_run_may_evaluate_most_of_the_time(run, caplog):
    for _ in range(9):
        run.go_on(1.0)
        run.evaluate(20.0)
    assert caplog.messages == []


def test_one_rank_warns_of_long_evaluations(caplog):
    trained = Trained(warns=False)
    for _ in range(30):
        trained.go_on(10.0)
        trained.evaluate(90.0)
    assert caplog.messages == []
