import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadyrl.agents.learner.schedules import linear
from steadyrl.core.clock import Interval, RateLimiter, StepRate


@given(every=st.integers(1, 50), jumps=st.lists(st.integers(0, 120), max_size=60))
def test_fires_once_whenever_multiples_were_passed(every, jumps):
    interval, step = Interval(every), 0
    for jump in jumps:
        before, step = step, step + jump
        assert interval.due(step) is (step // every > before // every)


def test_a_burst_passes_and_then_one_a_second():
    pace = RateLimiter(burst=100)
    passed = [tick for tick in range(5001) if pace.allows(tick / 100)]  # a hundred times a second
    assert passed[:100] == list(range(100))
    assert len(passed) == 150
    continued = RateLimiter(burst=100)
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


def outlook_of(rows, asked):
    """Return what is expected at these rows, of rows [seconds, updates] of one step each."""
    outlook, now, done, found = StepRate(), 0.0, 0, {}
    for step, (seconds, updates) in enumerate(rows, start=1):
        now, done = now + seconds, done + updates
        outlook.on_timestep(now, step, done)
        if step in asked:
            found[step] = outlook.take(now, step, done)
    return found


def test_what_is_compiled_in_the_first_rows_and_the_first_update_is_no_measure():
    rows = [(30.0, 0)] + [(0.1, 0)] * 99 + [(60.0, 1)] + [(0.25, 1)] * 299
    found = outlook_of(rows, asked=(100, 101, 200, 300, 400))
    assert found == pytest.approx({100: 0.0, 101: 0.0, 200: 4.0, 300: 4.0, 400: 4.0})


def test_a_time_without_updates_is_no_measure_where_steps_wait_for_them():
    rollout = [(0.1, 0)] * 9 + [(9.1, 4)]  # a step a second
    rows = [(30.0, 0), *rollout[1:9], (70.0, 4), *rollout * 5]
    found = outlook_of(rows, asked=(15, 20, 25, 30, 35, 40))
    assert found == pytest.approx({15: 0.0, 20: 1.0, 25: 1.0, 30: 1.0, 35: 1.0, 40: 1.0})


def test_where_nothing_is_learned_the_first_report_begins_to_count():
    found = outlook_of([(30.0, 0)] + [(0.1, 0)] * 299, asked=(100, 200, 300))
    assert found == pytest.approx({100: 0.0, 200: 10.0, 300: 10.0})


def test_updates_within_the_first_row_leave_the_next_to_count():
    found = outlook_of([(90.0, 50), (2.0, 50), (0.5, 50), (0.5, 50)], asked=(1, 2, 3, 4))
    assert found == pytest.approx({1: 0.0, 2: 0.0, 3: 2.0, 4: 2.0})
