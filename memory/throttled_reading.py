"""An expensive reading that is repeated rarely enough to cost next to nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

# A reading is repeated after at least this many times its own CPU time.
_PATIENCE = 400


class ThrottledReading(Generic[T]):
    """The newest result of an expensive function.

    It is called again at the earliest `every_seconds` after the last call, and never so often that
    it takes more than 1/400 of the time; `every_seconds=0`: at every poll. Its cost is measured in
    CPU time, because on a busy machine wall time is mostly waiting.
    """

    def __init__(
        self,
        read: Callable[[], T],
        every_seconds: float,
        clock: Callable[[], float],
        effort: Callable[[], float] = time.thread_time,
    ) -> None:
        self._read, self._every = read, every_seconds
        self._clock, self._effort = clock, effort
        self.value = self.refresh()

    def refresh(self) -> T:
        """Call the function now."""
        start = self._effort()
        self.value = self._read()
        self.cost = self._effort() - start
        wait = max(self._every, _PATIENCE * self.cost) if self._every else 0.0
        self._due = self._clock() + wait
        return self.value

    def poll(self) -> bool:
        """Call the function if it is due; return whether the value is new."""
        if self._clock() < self._due:
            return False
        self.refresh()
        return True
