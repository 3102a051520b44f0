"""Return a worker's unused memory to the system, as memory/cache_cleaner.py does the trainer's.

Without torch, which workers may not have loaded.
"""

from __future__ import annotations

import gc
import mmap
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from steadyrl.memory.host.malloc import trim

CHECK_EVERY = 1000  # commands between two looks at the memory, of some 20 µs
MIN_GROWTH = 64_000_000  # bytes of heap since the last cleaning
PATIENCE = 400  # a cleaning takes 1/400 of the time at most


def read_own_heap() -> int:
    """Return the resident bytes of this process without mapped files; 0 if they cannot be read."""
    with suppress(OSError):
        _, resident, shared, *_ = Path("/proc/self/statm").read_bytes().split()
        return (int(resident) - int(shared)) * mmap.PAGESIZE
    return 0


def clean_worker() -> None:
    """Collect garbage, then return free memory of malloc to the system."""
    gc.collect()
    trim()


class WorkerCleaner:
    """Cleans between two commands, once the worker has grown enough for it to be worth it."""

    def __init__(
        self,
        read: Callable[[], int] = read_own_heap,
        clean: Callable[[], None] = clean_worker,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._read, self._clean, self._clock = read, clean, clock
        self._commands, self._next = 0, clock()
        self._heap_after_clean = read()

    def on_command(self) -> None:
        """Count a command; look at the memory every so many, and clean if that pays."""
        self._commands += 1
        if self._commands % CHECK_EVERY:
            return
        start = self._clock()
        if start < self._next or self._read() - self._heap_after_clean < MIN_GROWTH:
            return
        self._clean()
        self._heap_after_clean = self._read()
        now = self._clock()
        self._next = now + PATIENCE * (now - start)
