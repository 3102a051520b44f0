import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadyrl.memory.leak import DoublingAlarm, SeriesGrowth, steady_gain, theil_sen
from steadyrl.memory.settings import LeakSettings


def growth_of(*, warmup, window):
    settings = LeakSettings(
        action="warn",
        warmup_samples=warmup,
        window_samples=window,
        max_growth_mb=64,
        cuda_max_growth_mb=10,
        max_growth_mb_per_million_steps=256,
        max_extra_handles=8,
        tracemalloc=False,
    )
    return SeriesGrowth(settings)


@given(st.floats(-5, 5), st.floats(-100, 100), st.integers(3, 40))
def test_theil_sen_of_a_line_is_exact(slope, start, count):
    steps = np.arange(count, dtype=float)
    assert theil_sen(steps, start + slope * steps) == pytest.approx(slope, abs=1e-9)


def test_theil_sen_ignores_outliers():
    steps = np.arange(40.0)
    values = 3 * steps
    values[::4] += 1e9
    assert theil_sen(steps, values) == pytest.approx(3, rel=0.5)
    two_points = (values[-4] - values[0]) / (steps[-4] - steps[0])
    assert two_points == pytest.approx(3)
    assert (values[-1] - values[0]) / 39 < -1e7  # the slope through the end points


def test_theil_sen_at_a_single_step_is_zero():
    assert theil_sen(np.zeros(5), np.arange(5.0)) == 0.0


def test_warm_up_does_not_count_as_growth():
    growth = growth_of(warmup=10, window=20)
    for step in range(10):
        assert not growth.warm
        growth.add(step, 100.0 * step)
    assert growth.warm and growth.since_step == 9
    for step in range(10, 40):
        growth.add(step, 900.0)
    assert growth.slope == 0.0
    assert growth.total == 900 - growth.baseline == 200  # the median of the last five


def test_a_spike_is_not_growth_but_a_jump_is():
    growth = growth_of(warmup=3, window=20)
    for step in range(13):
        growth.add(step, 5.0)
    growth.add(13, 1e6)
    assert growth.total == 0
    growth.add(14, 1e6)
    assert growth.total == 1e6 - 5


def test_growth_is_measured_in_a_sliding_window():
    growth = growth_of(warmup=1, window=10)
    for step in range(100):
        growth.add(step, 7.0 * min(step, 50))
    assert growth.slope == 0 and growth.steady == 0
    for step in range(100, 110):
        growth.add(step, 350 + 2.0 * step)
    assert growth.slope == pytest.approx(2) and growth.steady == pytest.approx(14)


def test_steady_gain_ignores_single_jumps():
    rise = [float(i) for i in range(30)]
    assert steady_gain(rise) == 20
    noise = [v + 3 * (-1) ** i for i, v in enumerate(rise)]
    assert steady_gain(noise) > 10
    for jump in range(1, 29):
        assert steady_gain([0.0] * jump + [500.0] * (30 - jump)) == 0
    settling = [1 - math.exp(-i / 6) for i in range(30)]
    assert steady_gain(settling) == 0
    assert steady_gain(rise[::-1]) == steady_gain([1.0, 2.0]) == steady_gain([5.0] * 30) == 0


@pytest.mark.parametrize("begin", [0, 300, 2000])
def test_slow_growth_is_found_however_late_it_begins(begin):
    growth = growth_of(warmup=5, window=20)
    for step in range(2 * begin + 1000):
        growth.add(step, 0.01 * max(0, step - begin) + (step % 3))
    assert growth.steady > 5 and len(growth._all) <= 41


def test_the_alarm_warns_once_per_doubling():
    alarm = DoublingAlarm()
    assert [alarm.should_warn(v) for v in (10, 11, 19, 20, 39, 41, 41)] == [
        True, False, False, True, False, True, False,
    ]  # fmt: skip
