"""Costly readings, taken so rarely that they cost next to nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

# A reading waits until at least this many times its own duration has passed.
_PATIENCE = 400


class Rarely(Generic[T]):
    """The newest result of a costly function.

    It is called again only `every_seconds` after the last call, and never so often that it takes
    more than 1/400 of the time; `every_seconds=0` calls it every time.
    """

    def __init__(
        self,
        read: Callable[[], T],
        every_seconds: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._read, self._every, self._clock = read, every_seconds, clock
        self.value = self.refresh()

    def refresh(self) -> T:
        """Call now."""
        start = self._clock()
        self.value = self._read()
        end = self._clock()
        self.cost = end - start
        wait = max(self._every, _PATIENCE * self.cost) if self._every else 0.0
        self._due = end + wait
        return self.value

    def poll(self) -> bool:
        """Call if it is time; return whether the value is new."""
        if self._clock() < self._due:
            return False
        self.refresh()
        return True
