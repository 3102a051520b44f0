"""Leak detection: tell steady growth from growth that settles, and name what grows."""

from __future__ import annotations

import tracemalloc
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median, median_low
from types import MappingProxyType
from typing import Any

import numpy as np

from steadyrl.memory.object_census import Census, grown_source_lines, growth_report, take_census
from steadyrl.memory.process import MB, Tree, Worker, readable
from steadyrl.memory.settings import LeakSettings

HOST, CUDA = "host", "CUDA"  # names of the series of memory in use

_HANDLES = {
    "threads": "a thread that is started anew and never joined",
    "children": "a child process (an environment's worker?) that is never closed",
    "open_files": "a file, socket or pipe that is opened and never closed",
}

_MEDIAN_SAMPLES = 3  # the current value is a median of this many samples: one spike is no growth
_TREND_SAMPLES = 8  # samples needed for a trend
# Fraction of the growth that each half must have; growth that settles lacks the second.
_STEADY_FRACTION = 0.25


def pair_slopes(steps: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the slopes between all pairs of points [n] at different steps."""
    first, second = np.triu_indices(len(steps), 1)
    run = steps[second] - steps[first]
    moved = run != 0
    slopes: np.ndarray = (values[second] - values[first])[moved] / run[moved]
    return slopes


def theil_sen(steps: np.ndarray, values: np.ndarray) -> float:
    """Return the Theil-Sen slope of points [n]: robust to 29 % outliers."""
    slopes = pair_slopes(steps, values)
    return float(np.median(slopes)) if len(slopes) else 0.0


def steady_gain(values: Sequence[float]) -> float:
    """Return the increase from the first to the last third; 0 unless it rose in both halves.

    A single step up is no leak, however high, nor is growth that levels off.
    """
    third = len(values) // 3
    if third == 0:
        return 0.0
    parts = (values[:third], values[third:-third], values[-third:])
    first, middle, last = (median_low(part) for part in parts)
    gain = last - first
    return gain if min(middle - first, last - middle) > _STEADY_FRACTION * gain > 0 else 0.0


class DoublingAlarm:
    """Rate limit of warnings: after the first one, only when the value has doubled."""

    def __init__(self) -> None:
        self._next = 0.0

    def should_warn(self, value: float) -> bool:
        """Return whether to warn about `value`, which exceeds its limit."""
        if value < self._next:
            return False
        self._next = 2 * value
        return True


class SeriesGrowth:
    """Growth of one series of samples since its warm-up: total, slope, and whether it is steady."""

    def __init__(self, settings: LeakSettings, max_growth_mb: float | None = None) -> None:
        self._settings, self._warmup = settings, settings.warmup_samples
        self._limit = MB * (settings.max_growth_mb if max_growth_mb is None else max_growth_mb)
        self._early: deque[float] = deque(maxlen=min(self._warmup, 5))
        self._window: deque[tuple[int, float]] = deque(maxlen=settings.window_samples)
        self._all: list[float] = []  # since the warm-up, thinned to every `_stride`-th
        self._stride, self._seen = 1, 0
        self._slope: float | None = 0.0  # None: to be computed
        self.alarm = DoublingAlarm()
        self.baseline = 0.0
        self.since_step = 0

    def add(self, step: int, value: float) -> None:
        """Add a sample."""
        self._seen += 1
        if self._seen <= self._warmup:
            self._early.append(value)
            self.baseline, self.since_step = median(self._early), step
            return
        self._window.append((step, value))
        self._slope = None
        if (self._seen - self._warmup) % self._stride == 0:
            self._all.append(value)
            if len(self._all) > 2 * self._settings.window_samples:
                self._all, self._stride = self._all[1::2], 2 * self._stride

    @property
    def warm(self) -> bool:
        """Whether the warm-up is over."""
        return self._seen >= self._warmup

    @property
    def total(self) -> float:
        """Growth since the warm-up."""
        if len(self._window) < _MEDIAN_SAMPLES:
            return 0.0
        newest = list(self._window)[-_MEDIAN_SAMPLES:]
        return median(value for _, value in newest) - self.baseline

    @property
    def slope(self) -> float:
        """Growth per step over the window; 0: too few samples."""
        if self._slope is None:
            points = np.array(self._window, dtype=np.float64)
            settled = len(points) >= _MEDIAN_SAMPLES
            self._slope = theil_sen(points[:, 0], points[:, 1]) if settled else 0.0
        return self._slope

    @property
    def steady(self) -> float:
        """Steady growth: the largest over the window, the newer half, and all samples."""
        window = [value for _, value in self._window]
        return max(map(steady_gain, (window, self._all[len(self._all) // 2 :], self._all)))

    @property
    def leaks(self) -> bool:
        """Whether growth is steady, and large or steep."""
        settings, limit = self._settings, self._limit
        if len(self._window) < min(_TREND_SAMPLES, settings.window_samples):
            return False
        if self.total <= limit / 4 or self.steady <= limit / 4:
            return False
        steep = self.slope * 1e6 / MB > settings.max_growth_mb_per_million_steps
        return steep or self.total > limit


class LeakDetector:
    """Detects leaks of memory (host, accelerator, each worker) and of handles.

    Memory leaks if it grows steadily by more than a quarter of `max_growth_mb`, and either by all
    of `max_growth_mb` since the warm-up or faster than `max_growth_mb_per_million_steps`; on an
    accelerator, where less is much, `cuda_max_growth_mb`. Warnings repeat when it has doubled.
    """

    def __init__(
        self,
        settings: LeakSettings,
        affordable: Callable[[], bool] = lambda: True,
        holders: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Start; the baseline census is taken after the warm-up, once it is `affordable`.

        What grows is searched for from `holders`, by name: agent, environments, callbacks.
        """
        self._settings, self._affordable, self._holders = settings, affordable, holders
        self._tracing = settings.tracemalloc and not tracemalloc.is_tracing()
        if self._tracing:
            tracemalloc.start()
        self.restart_warmup()

    def restart_warmup(self) -> None:
        """Drop all samples and warm up again: from now on the run needs more memory."""
        self._warm = False
        self._bytes: dict[str, SeriesGrowth] = {}
        self._workers: dict[int, SeriesGrowth] = {}
        self._handles: dict[str, tuple[int, DoublingAlarm]] = {}
        self._before: Census | None = None
        self._lines: tracemalloc.Snapshot | None = None

    def observe_bytes(self, name: str, step: int, nbytes: int) -> str | None:
        """Add a sample of memory in use; return a warning or None."""
        settings = self._settings
        limit = settings.cuda_max_growth_mb if name == CUDA else settings.max_growth_mb
        growth = self._bytes.setdefault(name, SeriesGrowth(settings, limit))
        growth.add(step, nbytes)
        self._warm = self._warm or growth.warm
        if self._warm and self._before is None and (growth.leaks or self._affordable()):
            # A leak this early is reported at the next sample, compared with this census.
            self._before = take_census(self._holders)
            if tracemalloc.is_tracing():
                self._lines = tracemalloc.take_snapshot()
            return None
        if not growth.leaks or not growth.alarm.should_warn(growth.total):
            return None
        return f"{name} {_describe_growth(growth, step)} {self._name_growth()}"

    def observe_tree(self, tree: Tree, step: int) -> list[str]:
        """Add a reading of workers and handles; return warnings."""
        alive = {worker.pid for worker in tree.workers}
        self._workers = {pid: found for pid, found in self._workers.items() if pid in alive}
        return self.observe_workers(tree.workers, step) + self._observe_handles(tree)

    def observe_workers(self, workers: Iterable[Worker], step: int) -> list[str]:
        """Add a sample of each worker's memory; return warnings."""
        return [warning for worker in workers if (warning := self._observe_worker(worker, step))]

    def slope(self, name: str) -> float:
        """Return the growth in MB per million steps; "host" includes all worker processes."""
        series = [self._bytes[name]] if name in self._bytes else []
        if name == HOST:
            series += self._workers.values()
        return sum(growth.slope for growth in series) * 1e6 / MB

    def close(self) -> None:
        """Stop tracemalloc if it was started here, and drop all samples."""
        if self._tracing:
            tracemalloc.stop()
            self._tracing = False
        self.restart_warmup()

    def _observe_worker(self, worker: Worker, step: int) -> str | None:
        # One series per process: a rebuilt worker has its own warm-up.
        growth = self._workers.setdefault(worker.pid, SeriesGrowth(self._settings))
        growth.add(step, worker.heap)
        if not growth.leaks or not growth.alarm.should_warn(growth.total):
            return None
        return (
            f"{worker.name} (process {worker.pid}): its {_describe_growth(growth, step)} "
            "The leak is in that process: the environment's code or its libraries; "
            f"env.backend=sync with memory.leak.tracemalloc=true names it, {_STOP}"
        )

    def _observe_handles(self, tree: Tree) -> list[str]:
        if not self._warm:
            return []
        warnings = []
        for name, hint in _HANDLES.items():
            count = getattr(tree, name)
            baseline, alarm = self._handles.setdefault(name, (count, DoublingAlarm()))
            more = count - baseline
            if more > self._settings.max_extra_handles and alarm.should_warn(more):
                words = name.replace("_", " ")
                warnings.append(
                    f"{count} {words} are {more} more than after the warm-up: look for {hint}. "
                    f"{self._name_growth()}"
                )
        return warnings

    def growers(self) -> list[str]:
        """Name what has grown since the warm-up; [] if it is too early to tell."""
        if self._before is None:
            return []
        found = growth_report(self._before, self._holders)
        return found if self._lines is None else found + grown_source_lines(self._lines)

    def _name_growth(self) -> str:
        if self._before is None:
            return "It is too early to name what grew."
        found, advice = self.growers(), _STOP
        if self._lines is None:
            advice = f"memory.leak.tracemalloc=true names the lines of code, {_STOP}"
        if not found:
            found = [
                "no Python object: a library's own memory, or the allocator's "
                "(try MALLOC_ARENA_MAX=2, or a smaller memory.cache.min_reclaimable_mb)"
            ]
        return f"What grew: {'; '.join(found)}. {advice}"


_STOP = "memory.leak.action=stop ends the run here"


def _describe_growth(growth: SeriesGrowth, step: int) -> str:
    return (
        f"memory grew by {readable(growth.total)} since step {growth.since_step:,} "
        f"and grows by {growth.slope * 1e6 / MB:,.0f} MB per million steps (step {step:,})."
    )
