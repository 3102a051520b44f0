import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadyrl.agents.learner.schedules import linear
from steadyrl.core.clock import Interval, RateLimiter, StepRate


@given(every=st.integers(1, 50), jumps=st.lists(st.integers(0, 120), max_size=60))
def test_an_interval_fires_once_per_passed_multiples(every, jumps):
    interval, step = Interval(every), 0
    for jump in jumps:
        before, step = step, step + jump
        assert interval.pop_due(step) is (step // every > before // every)


def test_rate_limiter_allows_a_burst_then_one_per_second():
    limiter = RateLimiter(burst=100)
    passed = [tick for tick in range(5001) if limiter.allows(tick / 100)]  # 100 calls a second
    assert passed[:100] == list(range(100))
    assert len(passed) == 150
    continued = RateLimiter(burst=100)
    continued.load_state_dict(limiter.state_dict())
    assert not continued.allows(50)
    assert continued.allows(51)


def test_rate_limiter_allows_ever_fewer_events_after_a_day():
    limiter = RateLimiter(burst=10)
    month = 30 * 86_400
    seconds = [at for at in range(0, month + 100, 4) if limiter.allows(at)]
    assert seconds[: 86_400 // 4] == list(range(0, 86_400, 4))
    assert len(seconds) < 86_400 * (1 + math.log(30)) + 20
    last = [later - at for at, later in zip(seconds[-20:-1], seconds[-19:], strict=True)]
    assert set(last) <= {28, 32}
    continued = RateLimiter(burst=10)
    continued.load_state_dict(limiter.state_dict())
    later = range(month + 100, month + 500)
    assert [continued.allows(at) for at in later] == [limiter.allows(at) for at in later]


def test_an_interval_of_zero_never_fires():
    interval = Interval(0)
    assert not interval.pop_due(10**9)
    assert interval.next is None


@pytest.mark.parametrize(("now", "value"), [(0, 1.0), (50, 0.55), (100, 0.1), (200, 0.1)])
def test_a_linear_schedule_reaches_exactly_its_end(now, value):
    assert linear(1.0, 0.1, 100, now) == pytest.approx(value, abs=1e-15)
    assert linear(1.0, 0.1, 100, 100) == 0.1


def test_a_schedule_over_zero_steps_is_at_its_end():
    assert linear(1.0, 0.1, 0, 0) == 0.1


def step_rates(timesteps, queried):
    """Return the estimated steps per second after the timesteps `queried`.

    `timesteps`: (seconds, updates) of each timestep of one step.
    """
    rate, now, done, found = StepRate(), 0.0, 0, {}
    for step, (seconds, updates) in enumerate(timesteps, start=1):
        now, done = now + seconds, done + updates
        rate.on_timestep(now, step, done)
        if step in queried:
            found[step] = rate.take(now, step, done)
    return found


def test_step_rate_excludes_compilation_of_first_steps_and_update():
    timesteps = [(30.0, 0)] + [(0.1, 0)] * 99 + [(60.0, 1)] + [(0.25, 1)] * 299
    found = step_rates(timesteps, queried=(100, 101, 200, 300, 400))
    assert found == pytest.approx({100: 0.0, 101: 0.0, 200: 4.0, 300: 4.0, 400: 4.0})


def test_step_rate_covers_whole_rollouts_with_their_updates():
    rollout = [(0.1, 0)] * 9 + [(9.1, 4)]  # one step per second
    timesteps = [(30.0, 0), *rollout[1:9], (70.0, 4), *rollout * 5]
    found = step_rates(timesteps, queried=(15, 20, 25, 30, 35, 40))
    assert found == pytest.approx({15: 0.0, 20: 1.0, 25: 1.0, 30: 1.0, 35: 1.0, 40: 1.0})


def test_without_updates_step_rate_counts_from_the_first_query():
    found = step_rates([(30.0, 0)] + [(0.1, 0)] * 299, queried=(100, 200, 300))
    assert found == pytest.approx({100: 0.0, 200: 10.0, 300: 10.0})


def test_step_rate_leaves_out_an_interval_in_which_the_process_was_suspended():
    steps = [(1.0, 1)] * 6
    suspended = [*steps[:3], (3600.0, 1), *steps]
    every = range(1, 11)
    assert step_rates(suspended, every)[4] == 1.0  # the faster of two
    assert {rate for step, rate in step_rates(suspended, every).items() if step > 2} == {1.0}


def test_step_rate_follows_a_lasting_change():
    found = step_rates([(1.0, 1)] * 10 + [(4.0, 1)] * 10, queried=range(1, 21))
    assert (found[10], found[12], found[13]) == (1.0, 1.0, 0.25)


def test_step_rate_excludes_the_timestep_after_the_first_updates():
    found = step_rates([(90.0, 50), (2.0, 50), (0.5, 50), (0.5, 50)], queried=(1, 2, 3, 4))
    assert found == pytest.approx({1: 0.0, 2: 0.0, 3: 2.0, 4: 2.0})
