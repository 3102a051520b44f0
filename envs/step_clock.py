"""How long rows take, and whether one is under way: for whoever waits for its end."""

from __future__ import annotations

import time
from collections.abc import Callable


class StepClock:
    """Times what environments do while nobody else can do anything: rows, starts, closing."""

    def __init__(self) -> None:
        self.slowest = 0.0  # seconds, of all so far
        self.on_slower: Callable[[], object] = bool  # called when that grew
        self._begun: float | None = None
        self._number = 0
        self._shown = memoryview(bytearray(8)).cast("Q")

    def show_in(self, memory: memoryview) -> None:
        """Keep the number of the row under way, or 0, at the beginning of this memory of 64 bits.

        So another process sees it whatever holds this one up.
        """
        self._shown = memory

    @property
    def running(self) -> float:
        """Seconds that the row under way has taken so far; 0 where there is none."""
        return 0.0 if self._begun is None else time.perf_counter() - self._begun

    def begin(self) -> None:
        """Say that environments work from now on, while this process does something else."""
        self._begun = time.perf_counter()

    def __enter__(self) -> None:
        if self._begun is None:
            self._begun = time.perf_counter()
        self._number += 1
        self._shown[0] = self._number

    def __exit__(self, *_: object) -> None:
        self._shown[0] = 0
        assert self._begun is not None
        took, self._begun = time.perf_counter() - self._begun, None
        if took > self.slowest:
            self.slowest = took
            self.on_slower()
