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
    warnings = [detector.observe_bytes("host", start + every * i, v) for i, v in enumerate(values)]
    return [warning for warning in warnings if warning]


def test_noisy_memory_causes_no_warning(detector):
    assert feed(detector, [(500 + 20 * (i % 3)) * MB for i in range(100)]) == []


def test_growth_during_warm_up_is_no_leak(detector):
    assert feed(detector, [100 * MB * min(i, 4) for i in range(60)]) == []


def test_a_single_jump_causes_at_most_one_warning(detector):
    assert feed(detector, [500 * MB] * 30) == []
    warnings = feed(detector, [800 * MB] * 90, start=300_000)
    assert len(warnings) <= 1


def test_slow_growth_is_warned_of_once_per_doubling(detector):
    # 1 MB per 10,000 steps: 100 MB per million, below the slope's limit.
    warnings = feed(detector, [(500 + i) * MB for i in range(400)])
    assert 2 <= len(warnings) <= 3
    assert "since step 40,000" in warnings[0] and "100 MB per million steps" in warnings[0]


def test_a_card_has_a_threshold_of_its_own(detector):
    small = [(500 + 0.3 * i) * MB for i in range(60)]  # 17 MB in all
    assert feed(detector, small) == []
    warnings = [detector.observe_bytes("CUDA", 10_000 * i, value) for i, value in enumerate(small)]
    assert sum(warning is not None for warning in warnings) == 1  # the next comes at 20 MB
    assert "CUDA memory grew by 10." in next(filter(None, warnings))


def test_fast_growth_is_found_by_its_rate(detector):
    # 4 MB per 1,000 steps: 4,000 MB per million.
    warnings = feed(detector, [(500 + 4 * i) * MB for i in range(16)], every=1_000)
    assert len(warnings) >= 1 and "4,000 MB per million steps" in warnings[0]


def test_shrinking_memory_is_no_leak(detector):
    assert feed(detector, [(5000 - 10 * i) * MB for i in range(100)]) == []


def test_growth_is_reported_in_mb_per_million_steps(detector):
    assert detector.slope("host") == 0.0
    feed(detector, [(500 + i) * MB for i in range(50)])
    assert detector.slope("host") == pytest.approx(100)


def test_handles_are_compared_with_those_after_warm_up(detector):
    tree = Tree(pss=0, kept=0, swap=0, heap=0, children=0, threads=10, open_files=20)
    assert detector.observe_tree(tree._replace(threads=500), 0) == []  # still warming up
    feed(detector, [500 * MB] * 6)
    assert detector.observe_tree(tree, 0) == []
    assert detector.observe_tree(tree._replace(open_files=28, threads=18), 0) == []
    (warnings,) = detector.observe_tree(tree._replace(open_files=29), 0)
    assert "29 open files are 9 more" in warnings
    assert detector.observe_tree(tree._replace(open_files=37), 0) == []
    assert len(detector.observe_tree(tree._replace(open_files=38, children=9), 0)) == 2


def test_growth_outside_of_python_is_named_so(leak_settings):
    detector = LeakDetector(leak_settings)
    original, leak.growth_report = leak.growth_report, lambda *_: []
    try:
        (warnings, *_) = feed(detector, [(500 + 10 * i) * MB for i in range(16)])
    finally:
        leak.growth_report = original
    assert "no Python object" in warnings and "MALLOC_ARENA_MAX" in warnings


def test_an_object_census_waits_until_affordable_or_needed(leak_settings, monkeypatch):
    censuses, affordable = [], []

    def census(_):
        censuses.append(len(censuses))
        return take_census()

    monkeypatch.setattr(leak, "take_census", census)
    detector = LeakDetector(leak_settings, lambda: bool(affordable))
    assert feed(detector, [500 * MB] * 20) == [] and censuses == []
    affordable.append(True)
    feed(detector, [500 * MB] * 5, start=300_000)
    assert censuses == [0]
    needed = LeakDetector(leak_settings, lambda: False)
    warnings = feed(needed, [(500 + 30 * i) * MB for i in range(30)])
    assert censuses == [0, 1] and len(warnings) >= 1
    handles = LeakDetector(leak_settings, lambda: False)
    feed(handles, [500 * MB] * 6)
    tree = Tree(pss=0, kept=0, swap=0, heap=0, children=0, threads=1, open_files=1)
    assert handles.observe_tree(tree, 0) == []
    assert "too early" in handles.observe_tree(tree._replace(threads=99), 0)[0]


def test_tracemalloc_is_stopped_only_by_the_detector_that_started_it(leak_settings):
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
