"""Slow-downs are distinguished from noise, once each time they double, and their cause is named."""

import numpy as np
import pytest

from steadyrl.memory.settings import SlowdownSettings
from steadyrl.training.speed.sample import Sample
from steadyrl.training.speed.slowdown import SlowdownDetector

SETTINGS = SlowdownSettings(max_percent=20, warmup_samples=5, window_samples=20)


def sample(step, *, waited=0.02, cpu=None, throttled=0.0, mhz=3000.0, rss_mb=400.0, length=50.0,
           updates=1.0, **parts):  # fmt: skip
    """Return a sample of a run whose step takes 1.78 ms, but for these parts in ms."""
    all_parts = dict(environment=0.1, act=0.08, update=1.5, callbacks=0.0, other=0.1) | parts
    total = sum(all_parts.values())
    return Sample(
        step=step, total=total, **all_parts, updates=updates, cpu=total if cpu is None else cpu,
        waited=waited, throttled=throttled, mhz=mhz, rss_mb=rss_mb, length=length,
    )  # fmt: skip


def warnings(samples, settings=SETTINGS, cores=1):
    detector = SlowdownDetector(settings, cores)
    return [warning for each in samples if (warning := detector.add(each))]


def steps(many, every=1000):
    return range(every, (many + 1) * every, every)


def changed(before, after, many=30):
    """Return samples with the first values for `many` samples, then with the second."""
    early = [sample(step, **before) for step in steps(many)]
    return early + [sample(many * 1000 + step, **after) for step in steps(many)]


def test_an_environment_that_becomes_slower_within_20_samples_is_named():
    """From 563 to 192 steps/s within 20,000 steps."""
    found = warnings([sample(s, environment=0.1 + 3.4 * s / 20_000, cpu=1.78) for s in steps(20)])
    assert len(found) == 1 and "\n" not in found[0]
    assert found[0].startswith("training became slower: ") and "steps/s until step" in found[0]
    assert "ms longer: environment 1.3" in found[0] and "update" not in found[0]
    assert (
        "The processor is not the cause (waited for it 0% of the time, 1% before; CPU 40%"
        in found[0]
    )


def test_warnings_repeat_when_the_added_time_has_doubled():
    levels = [{"update": 1.5 + added} for added in (0.0, 0.6, 0.9, 1.3, 2.7)]
    samples = [sample(40_000 * i + s, **level) for i, level in enumerate(levels) for s in steps(40)]
    found = warnings(samples)
    assert len(found) == 3
    assert ["(25% less" in found[0], "(42% less" in found[1], "(60% less" in found[2]] == [True] * 3


@pytest.mark.parametrize("changes", [{"update": 1.7}, {"update": 0.5}, {}])
def test_small_changes_and_faster_steps_are_no_slow_down(changes):
    assert warnings(changed({}, changes)) == []


def test_more_updates_per_step_are_other_work():
    """PPO's epochs that its limit on the KL divergence ends later; but not slower updates."""
    assert warnings(changed({"updates": 0.1}, {"update": 3.0, "updates": 0.2})) == []
    [found] = warnings(changed({"updates": 0.1}, {"update": 6.0, "updates": 0.2}))
    assert "update 1.5 to 6 ms" in found and "Updates per step went from 0.1 to 0.2" in found


def test_zero_switches_warnings_off_and_keeps_the_trend():
    detector = SlowdownDetector(SlowdownSettings(max_percent=0, warmup_samples=0,
                                                 window_samples=20), 1)  # fmt: skip
    assert [detector.add(each) for each in changed({}, {"update": 9.0})] == [None] * 60
    assert detector.trend.percent < -75


@pytest.mark.long
def test_noise_is_no_slow_down():
    """Log-normal noise of 20 %, and a quarter of the samples up to three times as slow."""
    noise = np.random.default_rng(0)
    alarms = 0
    for _ in range(300):
        factors = np.exp(0.2 * noise.standard_normal(200))
        factors *= np.where(noise.random(200) < 0.25, noise.uniform(1, 3, 200), 1)
        samples = [sample(s, update=1.5 * f) for s, f in zip(steps(200), factors, strict=True)]
        alarms += bool(warnings(samples))
    assert alarms <= 3


def test_a_restarted_warm_up_forgets_what_was_before():
    detector = SlowdownDetector(SETTINGS, 1)
    for each in changed({"update": 0.0}, {"update": 0.0}):
        detector.add(each)
    detector.restart_warmup()
    assert not any(detector.add(sample(60_000 + s)) for s in steps(60))


def test_memory_of_a_long_run_is_bounded():
    detector = SlowdownDetector(SETTINGS, 1)
    for step in steps(5000):
        detector.add(sample(step))
    assert len(detector._all) <= 120 and len(detector._first) == len(detector._last) == 20


def test_the_trend_is_a_change_in_percent_with_bounds():
    detector, noise = SlowdownDetector(SETTINGS, 1), np.random.default_rng(1)
    assert detector.trend is None
    for s in steps(400):
        factor = 1 + s / 400_000 + 0.05 * noise.standard_normal()
        detector.add(sample(s, update=2 * factor, environment=0.0, act=0.0, other=0.0))
    trend = detector.trend
    assert trend.low < trend.percent < trend.high < -45
    assert trend.percent > -52
