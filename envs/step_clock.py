"""Timing of environment steps, so that a hanging step can be detected from another process."""

from __future__ import annotations

import time
from collections.abc import Callable

NOT_AWAITED = 0.01  # seconds: waits that are shorter found the step done


class StepClock:
    """Times blocking environment calls: steps, resets and closing."""

    def __init__(self) -> None:
        self.slowest = 0.0  # seconds: the longest call so far
        self.on_slower: Callable[[], object] = lambda: None  # called when `slowest` grew
        self._begun: float | None = None
        self._waits_since = 0.0
        self._number = 0
        self._shown = memoryview(bytearray(8)).cast("Q")

    def show_in(self, memory: memoryview) -> None:
        """Publish the number of the running call (0: none) in these 64 bits of shared memory.

        A watching process can read it even if this one hangs.
        """
        self._shown = memory

    @property
    def running(self) -> float:
        """Seconds that the running call has taken so far; 0: none is running."""
        return 0.0 if self._begun is None else time.perf_counter() - self._begun

    def begin(self) -> None:
        """Start timing a step that runs in the background, before it is waited for."""
        self._begun = time.perf_counter()

    def __enter__(self) -> None:
        self._waits_since = time.perf_counter()
        if self._begun is None:
            self._begun = self._waits_since
        self._number += 1
        self._shown[0] = self._number

    def __exit__(self, *_: object) -> None:
        self._shown[0] = 0
        assert self._begun is not None
        now, begun = time.perf_counter(), self._begun
        took, self._begun = now - begun, None
        if begun < self._waits_since and now - self._waits_since < NOT_AWAITED:
            return  # a step in the background that ended unseen, while the learner was updating
        if took > self.slowest:
            self.slowest = took
            self.on_slower()
