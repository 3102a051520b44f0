"""Means of the newest updates and of collecting between them."""

from types import SimpleNamespace

import pytest

from steadyrl.training.speed import part_times
from steadyrl.training.speed.part_times import PartTimes


@pytest.fixture
def clock(monkeypatch):
    """Replace the clock of updates by one that `update` advances."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(part_times, "perf_counter", lambda: now.seconds)
    return now


def update(times, clock, seconds, learned=True, updates=0):
    def work():
        clock.seconds += seconds
        return object() if learned else None

    return times.timed_update(SimpleNamespace(update=work, updates=updates))


def test_the_slowest_gradient_step_leaves_out_the_first_update(clock):
    """That one compiles."""
    times = PartTimes()
    for seconds, updates in ((90.0, 1), (8.0, 5), (1.0, 6), (1.5, 6)):
        update(times, clock, seconds, updates=updates)
        clock.seconds += 100.0
    assert times.slowest == pytest.approx(2.0) and times.running == 0.0
    agent = SimpleNamespace(updates=7)

    def work():
        clock.seconds += 3.0
        assert times.running == pytest.approx(3.0)
        raise KeyboardInterrupt

    agent.update = work
    with pytest.raises(KeyboardInterrupt):
        times.timed_update(agent)
    assert times.running == 0.0


def test_means_cover_the_newest_updates_and_times_of_collecting(clock):
    times = PartTimes(step_times=2, collect_times=3)
    assert times.means() == {}
    for seconds in (9.0, 0.002, 0.004):
        times.act += 0.001
        times.environment += seconds
        update(times, clock, seconds)
    assert times.means() == {
        "time/step_ms": pytest.approx(3.0),
        "time/collect_ms": pytest.approx(1.0 + 1e3 * (9.0 + 0.002 + 0.004) / 3),
    }


def test_calls_without_an_update_count_as_collecting(clock):
    """PPO asks at every timestep, and learns once its rollout is full."""
    times = PartTimes()
    for _ in range(8):
        times.act += 0.003
        update(times, clock, 0.5, learned=False)
    update(times, clock, 0.25)
    assert times.means() == {
        "time/step_ms": pytest.approx(250.0),
        "time/collect_ms": pytest.approx(24.0),
    }


def test_a_resumed_run_begins_them_anew(clock):
    times, restored = PartTimes(), PartTimes()
    times.act = 100.0
    update(times, clock, 1.0)
    restored.load_state_dict(times.state_dict())
    assert restored.means() == {}
    restored.act += 0.5
    update(restored, clock, 1.0)
    assert restored.means()["time/collect_ms"] == pytest.approx(500.0)
