"""What is done as the limit nears, with a made-up meter and clock."""

import logging
from pathlib import Path

import pytest

from steadyrl.core.errors import MemoryBudgetError
from steadyrl.memory.bounds import Bound, margin_of
from steadyrl.memory.limit.limit import MemoryLimit
from steadyrl.memory.limit.meters import NEAR, BoundsMeter, Level
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

    def held(self, level):
        return "This process holds it"

    def grown(self, level):
        return "What grew: it. "


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


@pytest.fixture
def watched(clock, tmp_path):
    return Watched(clock, tmp_path / "trainers")


def test_far_from_the_limit_it_is_read_rarely(watched):
    for _ in range(1000):
        watched.step(seconds=0.001)
    assert 4 <= len(watched.meter.times) <= 6


def test_near_the_limit_it_is_read_before_memory_can_fill_it(watched):
    watched.stand_at(900)  # 36 MB below: filled in 18 ms at 2 GB/s
    watched.limit.check()
    read = len(watched.meter.times)
    for _ in range(1000):
        watched.step(seconds=0.001)
    assert 50 <= len(watched.meter.times) - read <= 60


def test_a_reading_takes_half_a_percent_of_the_time_at_most(clock, tmp_path):
    spent = [0.0]
    watched = Watched(clock, tmp_path)

    def read():
        spent[0] += 0.001
        return Meter.read(watched.meter)

    watched.meter.read = watched.meter.confirm = read
    watched.limit._effort = lambda: spent[0]
    watched.stand_at(935)
    for _ in range(10_000):
        watched.step(seconds=0.001)
    assert spent[0] <= 10 * (0.005 + 0.001)


def test_a_costly_exact_reading_leaves_no_long_gap(watched):
    """Reading many processes exactly takes 10 ms or more, which 200 times are seconds."""
    spent = [0.0]

    def confirm():
        spent[0] += 0.05
        return Meter.read(watched.meter)

    watched.meter.confirm = confirm
    watched.limit._effort = lambda: spent[0]
    watched.stand_at(850)
    watched.step()  # near
    with pytest.raises(MemoryBudgetError):
        for _ in range(30):
            watched.step(grows=10 * MB, seconds=0.01)
    assert watched.meter.used < 1130 * MB


def test_at_85_percent_it_is_said_once_cleaned_and_saved(watched, caplog):
    watched.stand_at(NEAR * 936 + 1)
    with caplog.at_level(logging.WARNING, "steadyrl"):
        for _ in range(5):
            watched.step(seconds=1)
    (line,) = caplog.messages
    assert line.startswith(
        "memory is near its limit: 797 MB are used of 936 MB "
        "(cgroup limit 1.00 GB, less 64.0 MB to save the run with). This process holds it. "
        "What grew: it. A checkpoint is saved now"
    )
    assert watched.cleanings == 1 and watched.limit.wants_save


def test_at_the_limit_the_run_ends_once(watched):
    watched.stand_at(940)
    with pytest.raises(MemoryBudgetError) as caught:
        watched.limit.check()
    assert str(caught.value) == (
        "the memory limit is reached: 940 MB are used of 936 MB (cgroup limit 1.00 GB, less "
        "64.0 MB to save the run with). This process holds it. What grew: it. "
        "Raise the limit, or lower agent.replay.capacity or env.num_envs"
    )
    watched.step(seconds=1)  # saving measures memory too
    assert watched.cleanings == 1


def test_a_cleaning_that_helps_clearly_is_repeated(clock, tmp_path):
    watched = Watched(clock, tmp_path, clean_gives=200 * MB)
    for _ in range(8):
        watched.stand_at(940)
        watched.step(seconds=1)
    assert watched.cleanings == 8


def test_a_cleaning_that_hardly_helps_is_the_last_one(clock, tmp_path):
    watched = Watched(clock, tmp_path, clean_gives=30 * MB)
    watched.stand_at(940)
    watched.step()  # 910 MB are above 95 %
    watched.step(seconds=1)
    watched.stand_at(940)
    with pytest.raises(MemoryBudgetError):
        watched.step(seconds=1)
    assert watched.cleanings == 1


def test_growth_from_step_to_step_is_met_before_the_step_that_exceeds_the_bound(watched):
    """200 MB a second, in steps of half a second: 100 MB each."""
    with pytest.raises(MemoryBudgetError, match="by the next step"):
        for _ in range(20):
            watched.step(grows=100 * MB, seconds=0.5)
    assert watched.meter.used <= 900 * MB


def test_a_single_jump_is_not_taken_for_growth(watched):
    for _ in range(5):
        watched.step(seconds=0.5)
    watched.step(grows=600 * MB, seconds=0.5)
    for _ in range(5):
        watched.step(seconds=0.5)


def test_a_second_jump_must_not_reach_the_groups_own_limit(watched):
    watched.stand_at(700)
    watched.step(seconds=0.5)
    with pytest.raises(MemoryBudgetError, match="180 MB more by the next step"):
        watched.step(grows=180 * MB, seconds=0.5)


def test_another_bound_that_leaves_least_is_no_growth(watched):
    """A run far from its own limit, in a group that others fill."""
    watched.stand_at(100)
    watched.step(seconds=0.5)
    outer = Bound("cgroup limit 8.00 GB", 8000 * MB, 7000 * MB, group=Path("/sys"))
    watched.meter.read = watched.meter.confirm = lambda: Level(outer, 512 * MB)
    for _ in range(5):
        watched.step(seconds=0.5)
    outer = outer._replace(used=7500 * MB)
    with pytest.raises(MemoryBudgetError, match="the memory limit is reached"):
        watched.step(seconds=0.5)


def test_what_the_first_update_takes_is_no_growth(watched):
    watched.stand_at(400)
    watched.step(seconds=0.5)
    watched.stand_at(880)  # a compiler
    watched.limit.begin()
    watched.step(seconds=0.5)
    watched.step(seconds=0.5)


@pytest.mark.parametrize(
    ("limit", "margin"), [(0.5e9, 64 * MB), (2e9, 100 * MB), (24e9, 512 * MB), (1e12, 512 * MB)]
)
def test_the_margin_is_5_percent_within_bounds(limit, margin):
    assert margin_of(int(limit)) == margin
    assert margin_of(int(limit), 30 * MB) == margin + 30 * MB


def test_the_bound_that_leaves_least_binds():
    class Found:
        def read(self, swapped):
            assert swapped == 7
            return [
                Bound("memory of this machine", 24_000 * MB, 20_000 * MB),
                Bound("cgroup limit 1.00 GB", 1000 * MB, 500 * MB),
                Bound("cgroup limit 4.00 GB", 4000 * MB, 500 * MB),
            ]

    level = BoundsMeter(Found(), lambda: 7, 10 * MB).read()
    assert level.bound.name == "cgroup limit 1.00 GB" and level.free == (1000 - 64 - 10 - 500) * MB


def test_without_a_meter_there_is_no_limit(clock, tmp_path):
    limit = MemoryLimit(
        None, clean=bool, kept=int, holders=NoHolders(), trainers=Trainers(tmp_path), clock=clock
    )
    clock.now = 1e9
    limit.check()


def test_a_trainer_that_grew_less_goes_on_into_the_margin(watched, monkeypatch):
    monkeypatch.setattr(Trainers, "publish", lambda *_, **__: 0.5)
    watched.stand_at(959)
    watched.limit.check()  # the other one ends: 936 MB + half of 48 MB
    watched.stand_at(961)
    with pytest.raises(MemoryBudgetError):
        watched.step(seconds=1)


def test_another_one_that_ends_is_seen_at_once(watched, monkeypatch):
    published = []
    monkeypatch.setattr(Trainers, "publish", lambda *_, **__: published[-1])
    published.append(0.0)
    watched.stand_at(930)
    watched.limit.check()
    published.append(1.0)
    watched.stand_at(960)
    watched.step(seconds=0.01)


def test_a_trainer_that_ends_stays_listed_until_its_process_has_ended(watched, tmp_path):
    watched.stand_at(940)
    with pytest.raises(MemoryBudgetError):
        watched.limit.check()
    watched.limit.close()
    assert len(list((tmp_path / "trainers").iterdir())) == 1
