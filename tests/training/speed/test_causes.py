"""The cause of a slow-down is named."""

import pytest

from steadyrl.training.speed.sample import PARTS
from tests.training.speed.test_slowdown import changed, warnings


@pytest.mark.parametrize("part", PARTS)
def test_the_part_that_takes_longer_is_named(part):
    [found] = warnings(changed({}, {part: 3.0}))
    assert f"ms longer: {part} " in found
    assert not any(f"{other} " in found for other in PARTS if other != part)
    assert "562 steps/s until step 30,000" in found


def test_others_on_the_same_core_are_named():
    """Every part takes twice the time, half of which the run waits for the processor."""
    slow = {"environment": 0.2, "act": 0.16, "update": 3.0, "other": 0.2}
    [found] = warnings(changed({}, {**slow, "waited": 1.78, "cpu": 1.78}))
    assert (
        "Other processes take the processor: the run waits for it 50% of the time, 1% before "
        "(CPU 50% of the time, 100% before)" in found
    )


def test_a_busy_machine_is_no_cause_if_it_was_as_busy_before():
    """Whatever takes longer is interrupted more often, too."""
    [found] = warnings(changed({"waited": 1.5}, {"update": 7.0, "waited": 5.5}))
    assert "The processor is not the cause (waited for it 76% of the time, 84% before" in found


def test_own_processes_that_fill_all_cores_are_no_others():
    [found] = warnings(changed({}, {"environment": 3.0, "waited": 3.0, "cpu": 9.0}), cores=2)
    assert "The run's own processes fill its 2 cores" in found


def test_a_limit_of_the_control_group_is_named():
    [found] = warnings(changed({}, {"update": 4.0, "throttled": 2.5, "waited": 2.5}))
    assert "The control group's CPU limit stopped the run for 58% more" in found
    assert "Other processes" not in found


def test_without_schedstat_the_cause_is_unknown_and_cpu_time_is_told():
    [found] = warnings(changed({"waited": None}, {"waited": None, "act": 2.0, "cpu": 1.78}))
    assert "unknown (CPU 48% of the time, 100% before)" in found


@pytest.mark.parametrize(
    ("after", "text"),
    [
        ({"mhz": 2000.0}, "clock fell from 3,000 to 2,000 MHz"),
        ({"length": 195.0}, "Episodes went from 50 to 195 steps"),
        ({"rss_mb": 700.0}, "Memory grew by 300 MB meanwhile"),
        ({"updates": 1.2}, "Updates per step went from 1 to 1.2"),
    ],
)
def test_what_else_changed_is_told(after, text):
    [found] = warnings(changed({}, {"update": 3.0, **after}))
    assert text in found
    [without] = warnings(changed({}, {"update": 3.0}))
    assert text.split()[0] not in without
