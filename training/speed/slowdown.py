"""Slow-down detection: has training become slower, or is it noise?"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from steadyrl.memory.leak import DoublingAlarm, pair_slopes
from steadyrl.memory.settings import SlowdownSettings
from steadyrl.training.speed.causes import causes, readable
from steadyrl.training.speed.sample import Sample, medians

FEWEST = 4  # samples in each of the two groups that are compared
KEPT = 120  # samples of the whole run, thinned
CERTAIN, Z95 = 3.5, 1.96  # standard deviations: of a slow-down, and of bounds of 95 %


class Trend(NamedTuple):
    """Change of the speed from the first sample to the last, in percent, with bounds of 95 %."""

    percent: float
    low: float
    high: float


class SlowdownDetector:
    """Compares the time of a step in the newest samples with that after the warm-up.

    Training is slower if the medians of both groups differ by `max_percent`, and a rank test says
    that this is no chance: Mann-Whitney's for the groups, or Mann-Kendall's for all samples as long
    as the groups are small. Time for more updates per step than before does not count: that is
    other work, such as PPO's epochs that its limit on the KL divergence ends later. Warnings repeat
    when the time that a step takes longer has doubled.
    """

    def __init__(self, settings: SlowdownSettings, cores: int) -> None:
        """Start; `cores` that this process may use."""
        self._settings, self._cores = settings, cores
        self.restart_warmup()

    def restart_warmup(self) -> None:
        """Drop all samples and warm up again: from now on a step does other work."""
        many = self._settings.window_samples
        self._seen = -self._settings.warmup_samples
        self._first: list[Sample] = []
        self._last: deque[Sample] = deque(maxlen=many)
        self._all: list[Sample] = []  # thinned to every `_stride`-th
        self._stride = 1
        self._alarm = DoublingAlarm()

    def add(self, sample: Sample) -> str | None:
        """Add a sample; return a warning or None."""
        self._seen += 1
        if self._seen <= 0:
            return None
        if len(self._first) < self._settings.window_samples:
            self._first.append(sample)
        self._last.append(sample)
        if self._seen % self._stride == 0:
            self._all.append(sample)
            if len(self._all) > KEPT:
                self._all, self._stride = self._all[1::2], 2 * self._stride
        return self._find_slowdown() if self._settings.max_percent else None

    @property
    def trend(self) -> Trend | None:
        """The speed's Theil-Sen trend since the warm-up; None: too few samples."""
        if len(self._all) < 2 * FEWEST:
            return None
        steps = np.array([sample.step for sample in self._all], dtype=np.float64)
        totals = np.array([sample.total for sample in self._all])
        slopes = np.sort(pair_slopes(steps, -np.log(totals)))
        n, pairs = len(steps), len(slopes)
        if not pairs:
            return None
        spread = Z95 * _kendall_deviation(n)
        low = slopes[max(0, int((pairs - spread) / 2))]
        high = slopes[min(pairs - 1, math.ceil((pairs + spread) / 2))]
        span = steps[-1] - steps[0]
        found = (np.median(slopes), low, high)
        return Trend(*(100 * float(np.expm1(slope * span)) for slope in found))

    def _find_slowdown(self) -> str | None:
        many = min(self._settings.window_samples, self._seen // 3)
        if many < FEWEST:
            return None
        first, last = self._first[:many], list(self._last)[-many:]
        before, now = medians(first), medians(last)
        times_before, times_now = (_same_work(group, before.updates) for group in (first, last))
        longer = median(times_now) / median(times_before) - 1
        if longer * (100 - self._settings.max_percent) < self._settings.max_percent:
            return None
        few = many < self._settings.window_samples  # too few to compare two groups
        everything = _same_work(self._all, before.updates)
        certainty = _kendall(everything) if few else _mann_whitney(times_before, times_now)
        if certainty < CERTAIN or not self._alarm.should_warn(longer):
            return None
        slower = 100 * (1 - before.total / now.total)
        since = self._last_step_below(before.total + (now.total - before.total) / 4, first[0].step)
        return (
            f"training became slower: {readable(1e3 / before.total)} steps/s until step "
            f"{since:,}, {readable(1e3 / now.total)} now ({slower:.0f}% less, step "
            f"{last[-1].step:,}). {'. '.join(causes(before, now, self._cores))}."
        )

    def _last_step_below(self, total: float, first: int) -> int:
        """Return the last step at which the median of three neighbours was at most `total`."""
        totals = [sample.total for sample in self._all]
        middle = [median(totals[max(0, i - 1) : i + 2]) for i in range(len(totals))]
        below = (s.step for s, m in zip(self._all, middle, strict=True) if m <= total)
        return max(below, default=first)


def _same_work(samples: Sequence[Sample], updates: float) -> list[float]:
    """Return milliseconds of steps as if none had more than so many updates."""
    return [
        s.total - (s.update * (1 - updates / s.updates) if s.updates > updates else 0.0)
        for s in samples
    ]


def _kendall(values: Sequence[float]) -> float:
    """Return in standard deviations of chance how far values [n] rise (Mann-Kendall)."""
    first, second = np.triu_indices(len(values), 1)
    found = np.array(values)
    rises = np.sign(found[second] - found[first]).sum()
    return float(rises / _kendall_deviation(len(values)))


def _kendall_deviation(n: int) -> float:
    return math.sqrt(n * (n - 1) * (2 * n + 5) / 18)


def _mann_whitney(before: Sequence[float], now: Sequence[float]) -> float:
    """Return in standard deviations of chance how far values [k] lie above others [k]."""
    k = len(before)
    above = np.sign(np.array(now)[:, None] - np.array(before)).sum() / 2
    return float(above / math.sqrt(k * k * (2 * k + 1) / 12))
