"""Growth of memory by the next reading, with a made-up meter and clock."""

from pathlib import Path

import pytest
from watched_limit import MB

from steadyrl.core.errors import MemoryBudgetError
from steadyrl.memory.bounds import Bound
from steadyrl.memory.limit.meters import Level


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
