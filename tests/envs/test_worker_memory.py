"""Workers clean by themselves: their garbage and free memory go back to the system."""

import numpy as np
import psutil
import pytest
from toy_environments import settings

from steadyrl.envs.factory import build_env
from steadyrl.envs.worker_memory import CHECK_EVERY, MIN_GROWTH, WorkerCleaner, read_own_heap

MB = 1_000_000


class Fake:
    """Heap and clock of a worker whose cleanings free what is garbage and take `cost` seconds."""

    def __init__(self, cost=0.5):
        self.heap, self.now, self.cost, self.cleaned = 100 * MB, 0.0, cost, 0

    def clean(self):
        self.cleaned += 1
        self.heap, self.now = 100 * MB, self.now + self.cost

    def cleaner(self):
        return WorkerCleaner(lambda: self.heap, self.clean, lambda: self.now)


def commands(cleaner, fake, count, grow=0, seconds=1.0):
    for _ in range(count):
        fake.heap += grow
        fake.now += seconds
        cleaner.on_command()


def test_a_worker_cleans_once_it_has_grown_enough():
    fake = Fake()
    cleaner = fake.cleaner()
    commands(cleaner, fake, 5 * CHECK_EVERY)
    assert fake.cleaned == 0  # nothing to gain
    commands(cleaner, fake, CHECK_EVERY, grow=MIN_GROWTH // CHECK_EVERY + 1)
    assert fake.cleaned == 1
    commands(cleaner, fake, 3 * CHECK_EVERY)
    assert fake.cleaned == 1


def test_cleaning_takes_a_small_part_of_the_time():
    fake = Fake(cost=2.0)
    cleaner = fake.cleaner()
    commands(cleaner, fake, 100 * CHECK_EVERY, grow=MB, seconds=0.01)  # 1000 s
    assert fake.cleaned == 2  # 800 s apart


@pytest.mark.skipif(not read_own_heap(), reason="this system has no /proc")
def test_garbage_of_a_worker_is_returned():
    config = settings("broken_envs:Litter-v0", backend="async", num_envs=1, kwargs={"size": 163840})
    action = np.zeros(1, np.int64)
    before = set(psutil.Process().children())
    with build_env(config, seed=0) as env:
        env.reset()
        (worker,) = set(psutil.Process().children()) - before
        start = worker.memory_info().rss
        for _ in range(CHECK_EVERY + 100):
            env.step(action)
        grown = worker.memory_info().rss - start
    assert grown < 40 * MB  # of 180 MB that were made
