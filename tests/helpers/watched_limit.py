"""A memory limit with a made-up meter and clock."""

from pathlib import Path

from steadyrl.memory.bounds import Bound
from steadyrl.memory.limit.limit import MemoryLimit
from steadyrl.memory.limit.meters import Level
from steadyrl.memory.limit.trainers import Trainers

MB = 1_000_000


class Meter:
    """A group of 1,000 MB with 64 MB of margin: the limit is at 936 MB."""

    def __init__(self, clock):
        self.clock, self.used, self.times = clock, 100 * MB, []

    def read(self):
        self.times.append(self.clock.now)
        bound = Bound("cgroup limit 1.00 GB", 1000 * MB, self.used, group=Path("/sys/group"))
        return Level(bound, 64 * MB)

    confirm = read


class NoHolders:
    def begin(self, level):
        pass

    def read(self, level):
        return level

    def held(self, now):
        return "This process holds it"

    def grown(self, now):
        return "What grew: it. "

    def remedy(self, now, level):
        return "Raise the limit, or lower agent.replay.capacity"


class Watched:
    """A limit under test, and what it did."""

    def __init__(self, clock, folder, clean_gives=0):
        self.clock, self.meter, self.cleanings = clock, Meter(clock), 0
        self.clean_gives = clean_gives
        self.limit = MemoryLimit(
            self.meter,
            clean=self.clean,
            kept=lambda: self.meter.used,
            holders=NoHolders(),
            trainers=Trainers(folder),
            clock=clock,
            effort=lambda: 0.0,
        )

    def clean(self):
        self.cleanings += 1
        self.meter.used -= self.clean_gives

    def stand_at(self, megabytes):
        """Use so much, without growth."""
        self.meter.used = int(megabytes * MB)
        self.limit.begin()

    def step(self, grows=0, seconds=0.01):
        self.clock.now += seconds
        self.meter.used += grows
        self.limit.check()
