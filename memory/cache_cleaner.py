"""Give memory back that nobody uses, when there is enough of it to be worth the time."""

from __future__ import annotations

import ctypes
import gc
import logging
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from steadyrl.memory.leak import DoublingAlarm
from steadyrl.memory.process import MB
from steadyrl.memory.settings import CacheSettings

log = logging.getLogger("steadyrl")

_MIN_CLEANINGS = 3  # cleanings before their share of the time means anything
_MAX_SHARE = 0.01
_TARGET_SHARE = 0.0025
_FIRST_COST = 0.5  # seconds; what a collection takes once a compiler is loaded
_CHECK_SECONDS = (
    0.1  # between two looks at what could be reclaimed; each reads a file of the system
)

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of glibc's malloc.h
LARGEST_OF_HEAP = 32 << 20  # bytes; glibc allows no more
MADV_DONTNEED = 4  # of sys/mman.h
# In Linux's list of a process's mappings: one of a file, not to be written to, all as in the file.
_CLEAN_FILE_MAPPING = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) r-[-x]p \S+ \S+ [1-9].*\n(?:[A-Z].*\n)*?Anonymous: +0 kB", re.M
)


class CleaningCost:
    """What cleaning has taken of the run's time, and whether it may take more."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._start = self._next_check = clock()
        self._seconds = self._reported = 0.0
        self._last = _FIRST_COST
        self._alarm = DoublingAlarm()
        self.times = 0

    def is_affordable(self) -> bool:
        """Say whether cleaning may be afforded; a look itself costs, and fast runs ask often."""
        now = self._clock()
        if now < self._next_check:
            return False
        self._next_check = now + _CHECK_SECONDS
        return self._seconds + self._last <= _TARGET_SHARE * (now - self._start)

    def add(self, since: float) -> None:
        """Count a cleaning that began at `since`; warn when they take too much."""
        now = self._clock()
        self._last = now - since
        self._seconds += self._last
        self.times += 1
        share = self._seconds / max(now - self._start, 1e-9)
        if self.times < _MIN_CLEANINGS or share <= _MAX_SHARE:
            return
        if self._alarm.should_warn(self._seconds):
            log.warning(
                "clearing caches took %.1f %% of the run so far (%d times): raise "
                "memory.cache.every_updates or memory.cache.min_reclaimable_mb",
                100 * share,
                self.times,
            )

    def pop_milliseconds(self) -> float:
        """Return what was spent since the last call."""
        milliseconds = (self._seconds - self._reported) * 1e3
        self._reported = self._seconds
        return milliseconds


class CacheCleaner:
    """Look at counts of updates, episodes and rollouts; clean when there is something to reclaim.

    Reclaimable is what the accelerator's allocator holds without using, and what the process has
    grown by (garbage in cycles would hide there), each above what the last cleaning left: pools
    of CUDA graphs are held for ever, and cleaning again would not give them back. Unless it is
    forced (`min_reclaimable_mb=0`), it waits until it costs less than 1/400 of the run's time.
    """

    def __init__(
        self,
        settings: CacheSettings,
        device: torch.device,
        rss: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        self._min_reclaimable = settings.min_reclaimable_mb * MB
        self._every = {
            "updates": settings.every_updates,
            "episodes": settings.every_episodes,
            "rollouts": settings.every_rollouts,
        }
        self._counts = dict.fromkeys(self._every, 0)
        self._device, self._rss, self._clock = device, rss, clock
        self._rss_after_clean, self._unused_after_clean = rss(), unused_by_allocator(device)
        self.cost = CleaningCost(clock)

    def note(self, kind: str, count: int) -> None:
        """Count updates, episodes or rollouts; look every so many of them."""
        count += self._counts[kind]
        every = self._every[kind]
        due = 0 < every <= count
        self._counts[kind] = count % every if due else count
        if due and (self._min_reclaimable == 0 or self._should_clean()):
            self.clean()

    def clean(self) -> None:
        """Give back what can be had, whatever it costs."""
        start = self._clock()
        reclaim(self._device)
        self._rss_after_clean, self._unused_after_clean = (
            self._rss(),
            unused_by_allocator(self._device),
        )
        self.cost.add(start)

    def begin(self) -> None:
        """Let go of what only starting took: what is held after it is where growth is from."""
        keep_freed_memory()
        unmap_clean_pages()
        self._rss_after_clean = self._rss()

    def _should_clean(self) -> bool:
        if not self.cost.is_affordable():
            return False
        unused = unused_by_allocator(self._device)
        self._unused_after_clean = min(self._unused_after_clean, unused)
        return (
            max(self._rss() - self._rss_after_clean, unused - self._unused_after_clean)
            >= self._min_reclaimable
        )


def unused_by_allocator(device: torch.device) -> int:
    """Return the bytes that the accelerator's allocator holds and no tensor lies in."""
    if device.type != "cuda":
        return 0
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def reclaim(device: torch.device) -> None:
    """Collect garbage first: it may be what keeps the allocators' blocks."""
    gc.collect()
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()
    trim()
    unmap_clean_pages()


def _libc(name: str) -> Any:
    """Return a function of the C library; None elsewhere than on Linux, or where it has none."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


def trim() -> None:
    """Hand freed memory back that the allocator of C keeps: milliseconds, more with a torn heap.

    glibc keeps what lies below a block in use, and up to 64 MB besides; others have no such call.
    """
    hand_back = _libc("malloc_trim")
    if hand_back is not None:
        hand_back(0)


def use_one_arena() -> None:
    """Let every thread allocate where the first one does: glibc keeps what others have freed."""
    choose = _libc("mallopt")
    if choose is not None:
        choose(M_ARENA_MAX, 1)


def keep_freed_memory() -> None:
    """Hand what was freed until now back, and keep of what is freed from now on up to 64 MB.

    An update frees what the next one asks for again. By itself glibc hands the end of its heap back
    where that is twice as large as the largest block was: hundreds of pages, which the system then
    clears anew for every update, or none, by what happens to lie behind them.
    """
    choose = _libc("mallopt")
    if choose is not None:
        trim()
        choose(M_MMAP_THRESHOLD, LARGEST_OF_HEAP)
        choose(M_TRIM_THRESHOLD, 2 * LARGEST_OF_HEAP)


def unmap_clean_pages() -> None:
    """Unmap what is as in its file, programs most of all: 50 ms, then what is used comes back.

    Most of torch's code and of a compiler's is needed only to start. The system keeps the files'
    pages while it has room, so one that is wanted again takes microseconds. What was written to, by
    the loader or for a debugger's breakpoint, is no longer as in its file and stays.
    """
    unmap = _libc("madvise")
    if unmap is None:
        return
    with suppress(OSError):
        for found in _CLEAN_FILE_MAPPING.finditer(Path("/proc/self/smaps").read_bytes()):
            start, end = (int(address, 16) for address in found.groups())
            unmap(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_DONTNEED)
