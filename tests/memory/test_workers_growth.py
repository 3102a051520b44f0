"""Growth of worker processes, from simulated readings: an hour takes a second."""

from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch

import steadyrl.memory.process
from steadyrl.core.errors import MemoryBudgetError
from steadyrl.memory.watch import MemoryWatch

MB = 1_000_000
STEPS_PER_SECOND = 600


class Tree:
    """Two simulated workers; `grown`: bytes of growth as a function of time."""

    def __init__(self, monkeypatch, clock):
        self.clock = clock
        self.drifted = lambda seconds: 0  # bytes no longer shared with the parent
        self.grown = {101: lambda seconds: 0, 102: lambda seconds: 0}
        self.pids = [101, 102]
        names = {101: "environment-0", 102: "environment-1"}
        active = [SimpleNamespace(pid=pid, name=name) for pid, name in names.items()]
        monkeypatch.setattr("multiprocessing.active_children", lambda: active)
        monkeypatch.setattr(steadyrl.memory.process, "_rollup", self.rollup)
        monkeypatch.setattr(psutil.Process, "children", lambda process, recursive: self.children())

    def children(self):
        return [SimpleNamespace(pid=pid) for pid in self.pids]

    def rollup(self, pid):
        # A page shared by k processes counts 1/k in PSS, fully in Anonymous.
        drifted = self.drifted(self.clock.now)
        if pid not in self.grown:
            return {
                "Pss": 150 * MB + drifted,
                "Pss_Anon": 100 * MB + drifted,
                "Anonymous": 400 * MB,
            }
        more = self.grown[pid](self.clock.now)
        anon = 100 * MB + drifted + more
        return {"Pss": anon + 50 * MB, "Pss_Anon": anon, "Anonymous": 300 * MB + more}


@pytest.fixture
def tree(monkeypatch, clock):
    return Tree(monkeypatch, clock)


@pytest.fixture
def watch(settings, clock):
    """Return a watch with default settings, except that leaks stop and tensors are not counted."""
    monitor = replace(settings.monitor, tensors_every_seconds=1e9)
    stops = replace(settings, monitor=monitor, leak=replace(settings.leak, action="stop"))
    found = MemoryWatch(stops, torch.device("cpu"), clock=clock)
    yield found
    found.close()


def run_for(watch, clock, *, seconds, every):
    for _ in range(int(seconds / every)):
        clock.now += every
        watch.measure(int(clock.now * STEPS_PER_SECOND))


def test_pages_that_stop_being_shared_are_no_leak(watch, clock, tree):
    tree.drifted = lambda seconds: 90 * MB * (1 - 2 ** (-seconds / 60))
    run_for(watch, clock, seconds=3600, every=0.5)


def test_a_leak_of_one_kilobyte_per_episode_names_the_worker(watch, clock, tree):
    tree.drifted = lambda seconds: 90 * MB * (1 - 2 ** (-seconds / 60))
    tree.grown[102] = lambda seconds: 1024 * seconds * STEPS_PER_SECOND / 200
    with pytest.raises(MemoryBudgetError) as caught:
        run_for(watch, clock, seconds=10 * 3600, every=30)
    message = str(caught.value)
    assert message.startswith("environment-1 (process 102): its memory grew by 64.")
    assert "environment-0" not in message and "\n" not in message
    assert "by 5 MB per million steps" in message


def test_a_replaced_worker_has_its_own_warm_up(watch, clock, tree):
    run_for(watch, clock, seconds=600, every=5)
    tree.grown[103] = lambda seconds: 500 * MB  # the parent's memory has grown by now
    tree.pids[1] = 103
    run_for(watch, clock, seconds=1800, every=5)


def test_the_logged_growth_sums_all_processes(watch, clock, tree):
    tree.grown[101] = tree.grown[102] = lambda seconds: 1000 * seconds
    run_for(watch, clock, seconds=1800, every=10)
    clock.now += 10
    slope = watch.measure(int(clock.now * STEPS_PER_SECOND))["memory/growth_mb_per_million_steps"]
    assert slope == pytest.approx(2 * 1000 / STEPS_PER_SECOND, rel=0.2)
