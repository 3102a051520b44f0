"""Growth of one number over the run: a robust slope, and an alarm that doubles."""

from __future__ import annotations

from collections import deque
from statistics import median

import numpy as np

_SETTLED = 3  # samples whose median stands for "now", so that one spike is no growth


def theil_sen(steps: np.ndarray, values: np.ndarray) -> float:
    """Return the median slope over all pairs of points [n]: a third of them may be outliers."""
    first, second = np.triu_indices(len(steps), 1)
    run = steps[second] - steps[first]
    moved = run != 0
    if not moved.any():
        return 0.0
    return float(np.median((values[second] - values[first])[moved] / run[moved]))


class Growth:
    """What a series has grown since its warm-up, and how steeply it grows now."""

    def __init__(self, *, warmup: int, window: int) -> None:
        self._warmup = warmup
        self._early: deque[float] = deque(maxlen=min(warmup, 5))
        self._window: deque[tuple[int, float]] = deque(maxlen=window)
        self._seen = 0
        self._slope: float | None = 0.0  # None: to be computed
        self.baseline = 0.0
        self.since_step = 0

    def add(self, step: int, value: float) -> None:
        """Take a sample."""
        self._seen += 1
        if self._seen <= self._warmup:
            self._early.append(value)
            self.baseline, self.since_step = median(self._early), step
        else:
            self._window.append((step, value))
            self._slope = None

    @property
    def warm(self) -> bool:
        """Whether the warm-up is over: the next sample counts."""
        return self._seen >= self._warmup

    @property
    def samples(self) -> int:
        """Samples in the window."""
        return len(self._window)

    @property
    def total(self) -> float:
        """Growth since the warm-up."""
        if len(self._window) < _SETTLED:
            return 0.0
        newest = list(self._window)[-_SETTLED:]
        return median(value for _, value in newest) - self.baseline

    @property
    def slope(self) -> float:
        """Growth per step over the window; 0 until there are enough samples."""
        if self._slope is None:
            points = np.array(self._window, dtype=np.float64)
            settled = len(points) >= _SETTLED
            self._slope = theil_sen(points[:, 0], points[:, 1]) if settled else 0.0
        return self._slope

    @property
    def in_window(self) -> float:
        """What the slope amounts to over the window."""
        if not self._window:
            return 0.0
        return self.slope * (self._window[-1][0] - self._window[0][0])


class Doubling:
    """Ring at a level, and then only at each doubling of what rang."""

    def __init__(self) -> None:
        self._next = 0.0

    def rings(self, value: float) -> bool:
        """Return whether to speak up about `value`, which is over its limit."""
        if value < self._next:
            return False
        self._next = 2 * value
        return True
