"""Return unused memory to the system when there is enough of it to be worth the time."""

from __future__ import annotations

import ctypes
import gc
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from steadyrl.memory.host.malloc import libc, trim
from steadyrl.memory.leak import DoublingAlarm
from steadyrl.memory.process import MB
from steadyrl.memory.settings import CacheSettings

log = logging.getLogger("steadyrl")

_MIN_CLEANINGS = 3  # cleanings before their fraction of the run's time is reported
_MAX_SHARE = 0.01
_TARGET_SHARE = 0.0025
_FIRST_COST = 0.5  # seconds; initial guess: a garbage collection with a compiler loaded
_CHECK_SECONDS = 0.1  # between two checks of reclaimable memory, which read /proc

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
LARGEST_OF_HEAP = 32 << 20  # bytes; glibc's maximum
MADV_DONTNEED = 4  # sys/mman.h
# In /proc/self/smaps: a read-only file mapping without modified pages.
_CLEAN_FILE_MAPPING = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) r-[-x]p \S+ \S+ [1-9].*\n(?:[A-Z].*\n)*?Anonymous: +0 kB", re.M
)


class CleaningCost:
    """Time spent on cleaning, and whether more may be spent."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._start = self._next_check = clock()
        self._seconds = self._reported = 0.0
        self._last = _FIRST_COST
        self._alarm = DoublingAlarm()
        self.times = self.returned = 0  # cleanings, and the bytes that they gave back

    def is_affordable(self) -> bool:
        """Return whether another cleaning stays within the target fraction of the run's time.

        At most one check per _CHECK_SECONDS: the check itself costs time, and fast runs call often.
        """
        now = self._clock()
        if now < self._next_check:
            return False
        self._next_check = now + _CHECK_SECONDS
        return self._seconds + self._last <= _TARGET_SHARE * (now - self._start)

    def add(self, since: float, returned: int) -> None:
        """Record a cleaning that began at `since`; warn if cleaning takes too much time."""
        now = self._clock()
        self._last = now - since
        self._seconds += self._last
        self.times += 1
        self.returned += max(0, returned)  # meanwhile another thread may have taken more
        log.debug("cleaning gave back %.1f MB in %.0f ms", returned / MB, 1e3 * self._last)
        fraction = self._seconds / max(now - self._start, 1e-9)
        if self.times < _MIN_CLEANINGS or fraction <= _MAX_SHARE:
            return
        if self._alarm.should_warn(self._seconds):
            log.warning(
                "clearing caches took %.1f %% of the run so far (%d times): raise "
                "memory.cache.every_updates or memory.cache.min_reclaimable_mb",
                100 * fraction,
                self.times,
            )

    def pop_milliseconds(self) -> float:
        """Return the milliseconds spent since the last call."""
        milliseconds = (self._seconds - self._reported) * 1e3
        self._reported = self._seconds
        return milliseconds


class CacheCleaner:
    """Cleans caches every so many updates, episodes or rollouts, if there is memory to reclaim.

    Reclaimable memory is the larger of the CUDA allocator's unused cache and the growth of RSS
    (which may be garbage in reference cycles), each relative to the last cleaning, because CUDA
    graph pools are never returned. Unless forced (`min_reclaimable_mb=0`), cleaning takes less than
    1/400 of the run's time.
    """

    def __init__(
        self,
        settings: CacheSettings,
        device: torch.device,
        rss: Callable[[], int],
        clock: Callable[[], float],
        *,
        own_process: bool = True,
    ) -> None:
        self._own_process = own_process  # else malloc and its pages are another program's
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
        """Count updates, episodes or rollouts; clean if it is due and worth it."""
        count += self._counts[kind]
        every = self._every[kind]
        due = 0 < every <= count
        self._counts[kind] = count % every if due else count
        if due and (self._min_reclaimable == 0 or self._should_clean()):
            self.clean()

    def clean(self) -> None:
        """Clean now."""
        before, start = self._rss() + unused_by_allocator(self._device), self._clock()
        reclaim(self._device, own_process=self._own_process)
        self._rss_after_clean = self._rss()
        self._unused_after_clean = unused_by_allocator(self._device)
        self.cost.add(start, before - self._rss_after_clean - self._unused_after_clean)

    def begin(self) -> None:
        """Release memory that only start-up needed, and take the baseline of RSS growth."""
        if self._own_process:
            keep_freed_memory()
            unmap_clean_pages()
        self._rss_after_clean = self._rss()

    def _should_clean(self) -> bool:
        if not self.cost.is_affordable():
            return False
        unused = unused_by_allocator(self._device)
        self._unused_after_clean = min(self._unused_after_clean, unused)
        grown = max(self._rss() - self._rss_after_clean, unused - self._unused_after_clean)
        return grown >= self._min_reclaimable


def unused_by_allocator(device: torch.device) -> int:
    """Return the bytes that the CUDA allocator has reserved but not allocated."""
    if device.type != "cuda":
        return 0
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def reclaim(device: torch.device, *, own_process: bool = True) -> None:
    """Collect garbage, then return free memory of all allocators to the system.

    In another program's process (`own_process` false) malloc and mapped pages stay as they are.
    """
    gc.collect()
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()
    if own_process:
        trim()
        unmap_clean_pages()


def keep_freed_memory() -> None:
    """Trim now, then let malloc keep up to 64 MB of freed memory for reuse.

    An update frees what the next one allocates again. With its dynamic threshold glibc may return
    hundreds of pages after every update, which the kernel then has to zero again.
    """
    choose = libc("mallopt")
    if choose is not None:
        trim()
        choose(M_MMAP_THRESHOLD, LARGEST_OF_HEAP)
        choose(M_TRIM_THRESHOLD, 2 * LARGEST_OF_HEAP)


def unmap_clean_pages() -> None:
    """Drop unmodified pages of mapped files (mostly program code) from RSS; takes 50 ms.

    Most of torch's and a compiler's code is needed at start-up only. Pages needed again come back
    from the page cache in microseconds. Modified pages (relocations, breakpoints) stay.
    """
    unmap = libc("madvise")
    if unmap is None:
        return
    with suppress(OSError):
        for found in _CLEAN_FILE_MAPPING.finditer(Path("/proc/self/smaps").read_bytes()):
            start, end = (int(address, 16) for address in found.groups())
            unmap(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_DONTNEED)
