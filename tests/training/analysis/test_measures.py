"""Score, speed and memory of past runs."""

from types import SimpleNamespace

import pytest

from steadyrl.training.analysis.measures import SPEED, speed


def test_the_speed_of_a_run_without_a_summary_is_steps_by_seconds():
    """As that of a finished run: slow intervals count by their time."""
    logged = {1000.0: 100.0, 3000.0: 1000.0}  # 10 and 2 seconds
    run = SimpleNamespace(summary={}, metrics={SPEED: logged}, is_running=False)
    assert speed(run) == pytest.approx(3000 / 12)
    run.summary = {"steps_per_second": 7.0}
    assert speed(run) == 7.0
    run.is_running = True  # resumed: the summary is of the part before
    assert speed(run) == pytest.approx(3000 / 12)


def test_a_run_that_has_logged_no_speed_has_none():
    assert speed(SimpleNamespace(summary={}, metrics={}, is_running=True)) is None
