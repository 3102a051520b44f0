import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.schedules import linear
from training.timing import Interval, Pace


@given(every=st.integers(1, 50), jumps=st.lists(st.integers(0, 120), max_size=60))
def test_fires_once_whenever_multiples_were_passed(every, jumps):
    interval, step = Interval(every), 0
    for jump in jumps:
        before, step = step, step + jump
        assert interval.due(step) is (step // every > before // every)


def test_a_burst_passes_and_then_one_a_second():
    pace = Pace(at_once=100)
    passed = [tick for tick in range(5001) if pace.allows(tick / 100)]  # a hundred times a second
    assert passed[:100] == list(range(100))
    assert len(passed) == 150
    continued = Pace(at_once=100)
    continued.load_state_dict(pace.state_dict())
    assert not continued.allows(50)
    assert continued.allows(51)


def test_zero_never_fires():
    interval = Interval(0)
    assert not interval.due(10**9)
    assert interval.next is None


@pytest.mark.parametrize(("now", "value"), [(0, 1.0), (50, 0.55), (100, 0.1), (200, 0.1)])
def test_a_linear_schedule_reaches_exactly_its_end(now, value):
    assert linear(1.0, 0.1, 100, now) == pytest.approx(value, abs=1e-15)
    assert linear(1.0, 0.1, 100, 100) == 0.1


def test_a_schedule_over_no_steps_is_at_its_end():
    assert linear(1.0, 0.1, 0, 0) == 0.1
