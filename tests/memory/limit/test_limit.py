"""What is done as the limit nears, with a made-up meter and clock."""

import logging

import pytest
from watched_limit import MB, Meter, NoHolders, Watched

from steadyrl.core.errors import MemoryBudgetError
from steadyrl.memory.bounds import Bound, margin_of
from steadyrl.memory.limit.limit import MemoryLimit
from steadyrl.memory.limit.meters import NEAR, BoundsMeter
from steadyrl.memory.limit.trainers import Trainers


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
        "Raise the limit, or lower agent.replay.capacity"
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
