import tracemalloc
from dataclasses import replace

import pytest

from steadyrl.memory import leak
from steadyrl.memory.leak import LeakDetector
from steadyrl.memory.object_census import take_census
from steadyrl.memory.process import Tree

MB = 1_000_000


@pytest.fixture
def leak_settings(settings):
    return replace(
        settings.leak,
        warmup_samples=5,
        window_samples=20,
        max_growth_mb=64,
        max_growth_mb_per_million_steps=256,
    )


@pytest.fixture
def detector(leak_settings):
    found = LeakDetector(leak_settings)
    yield found
    found.close()


def feed(detector, values, every=10_000, start=0):
    said = [detector.observe_bytes("host", start + every * i, v) for i, v in enumerate(values)]
    return [warning for warning in said if warning]


def test_flat_and_noisy_memory_says_nothing(detector):
    assert feed(detector, [(500 + 20 * (i % 3)) * MB for i in range(100)]) == []


def test_filling_up_during_the_warm_up_is_no_leak(detector):
    assert feed(detector, [100 * MB * min(i, 4) for i in range(60)]) == []


def test_memory_that_moved_up_once_is_asked_about_at_most_once(detector):
    assert feed(detector, [500 * MB] * 30) == []
    said = feed(detector, [800 * MB] * 90, start=300_000)
    assert len(said) <= 1


def test_slow_growth_is_found_by_its_total_and_told_once_per_doubling(detector):
    # 1 MB per 10,000 steps: 100 MB per million, below the slope's limit.
    said = feed(detector, [(500 + i) * MB for i in range(400)])
    assert 2 <= len(said) <= 3
    assert "since step 40,000" in said[0] and "100 MB per million steps" in said[0]


def test_steep_growth_is_found_before_its_total(detector):
    # 4 MB per 1,000 steps: 4,000 MB per million.
    said = feed(detector, [(500 + 4 * i) * MB for i in range(16)], every=1_000)
    assert len(said) >= 1 and "4,000 MB per million steps" in said[0]


def test_shrinking_is_no_leak_however_large_it_is(detector):
    assert feed(detector, [(5000 - 10 * i) * MB for i in range(100)]) == []


def test_the_slope_is_reported_in_mb_per_million_steps(detector):
    assert detector.slope("host") == 0.0
    feed(detector, [(500 + i) * MB for i in range(50)])
    assert detector.slope("host") == pytest.approx(100)


def test_handles_are_compared_with_those_after_the_warm_up(detector):
    tree = Tree(pss=0, heap=0, children=0, threads=10, open_files=20)
    assert detector.observe_tree(tree._replace(threads=500), 0) == []  # still warming up
    feed(detector, [500 * MB] * 6)
    assert detector.observe_tree(tree, 0) == []
    assert detector.observe_tree(tree._replace(open_files=28, threads=18), 0) == []
    (said,) = detector.observe_tree(tree._replace(open_files=29), 0)
    assert "29 open files are 9 more" in said
    assert detector.observe_tree(tree._replace(open_files=37), 0) == []
    assert len(detector.observe_tree(tree._replace(open_files=38, children=9), 0)) == 2


def test_growth_without_a_python_object_says_so(leak_settings):
    detector = LeakDetector(leak_settings)
    original, leak.growth_report = leak.growth_report, lambda before: []
    try:
        (said, *_) = feed(detector, [(500 + 10 * i) * MB for i in range(16)])
    finally:
        leak.growth_report = original
    assert "no Python object" in said and "MALLOC_ARENA_MAX" in said


def test_a_census_waits_until_it_is_affordable_or_needed(leak_settings, monkeypatch):
    taken, affordable = [], []

    def census():
        taken.append(len(taken))
        return take_census()

    monkeypatch.setattr(leak, "take_census", census)
    detector = LeakDetector(leak_settings, lambda: bool(affordable))
    assert feed(detector, [500 * MB] * 20) == [] and taken == []
    affordable.append(True)
    feed(detector, [500 * MB] * 5, start=300_000)
    assert taken == [0]
    needed = LeakDetector(leak_settings, lambda: False)
    said = feed(needed, [(500 + 30 * i) * MB for i in range(30)])
    assert taken == [0, 1] and len(said) >= 1
    handles = LeakDetector(leak_settings, lambda: False)
    feed(handles, [500 * MB] * 6)
    tree = Tree(pss=0, heap=0, children=0, threads=1, open_files=1)
    assert handles.observe_tree(tree, 0) == []
    assert "too early" in handles.observe_tree(tree._replace(threads=99), 0)[0]


def test_tracing_is_stopped_by_whoever_started_it(leak_settings):
    trace = replace(leak_settings, tracemalloc=True)
    detector = LeakDetector(trace)
    assert tracemalloc.is_tracing()
    detector.close()
    assert not tracemalloc.is_tracing()
    tracemalloc.start()
    try:
        LeakDetector(trace).close()
        assert tracemalloc.is_tracing()
    finally:
        tracemalloc.stop()
