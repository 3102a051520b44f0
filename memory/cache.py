"""Give memory back that nobody uses, when there is enough of it to be worth the time."""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
import time
from collections.abc import Callable

import torch

from memory.leak import DoublingAlarm
from memory.process import MB
from memory.settings import CacheSettings

log = logging.getLogger("steadyrl")

_WORTH_SAYING = 3  # cleanings before their share of the time means anything
_MAX_SHARE = 0.01
_PATIENT_SHARE = 0.0025
_FIRST_COST = 0.5  # seconds; what a collection takes once a compiler is loaded
_LOOK_SECONDS = 0.1  # between two looks at what could be reclaimed; each reads a file of the system


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
        clock: Callable[[], float] = time.perf_counter,
        unused: Callable[[torch.device], int] | None = None,
    ) -> None:
        self._settings, self._rss, self._clock = settings, rss, clock
        self._device, self._unused = device, unused or unused_by_allocator
        self._counts = {"updates": 0, "episodes": 0, "rollouts": 0}
        self._clean_rss, self._clean_unused = rss(), self._unused(device)
        self._start = self._next_look = clock()
        self._interval_seconds = self._seconds = 0.0
        self._cost = _FIRST_COST
        self._alarm = DoublingAlarm()
        self.cleanings = 0

    def on_updates(self, count: int) -> None:
        """Count updates; look every `every_updates` of them."""
        self._note("updates", count, self._settings.every_updates)

    def on_episodes(self, count: int) -> None:
        """Count finished episodes; look every `every_episodes` of them."""
        self._note("episodes", count, self._settings.every_episodes)

    def on_rollout(self) -> None:
        """Count a finished rollout; look every `every_rollouts` of them."""
        self._note("rollouts", 1, self._settings.every_rollouts)

    def _note(self, kind: str, count: int, every: int) -> None:
        count += self._counts[kind]
        due = 0 < every <= count
        self._counts[kind] = count % every if due else count
        if due:
            self.look()

    def look(self) -> bool:
        """Clean if enough can be reclaimed; return whether it did."""
        least = self._settings.min_reclaimable_mb * MB
        if least > 0 and not (self._is_time() and self._reclaimable() >= least):
            return False
        self.clean()
        return True

    def _is_time(self) -> bool:
        """Say whether cleaning may be afforded; a look itself costs, and fast runs ask often."""
        now = self._clock()
        if now < self._next_look:
            return False
        self._next_look = now + _LOOK_SECONDS
        return self._seconds + self._cost <= _PATIENT_SHARE * (now - self._start)

    def _reclaimable(self) -> int:
        unused = self._unused(self._device)
        self._clean_unused = min(self._clean_unused, unused)
        return max(self._rss() - self._clean_rss, unused - self._clean_unused)

    def clean(self) -> None:
        """Give back what can be had, whatever it costs."""
        start = self._clock()
        reclaim(self._device)
        self._clean_rss, self._clean_unused = self._rss(), self._unused(self._device)
        self.cleanings += 1
        now = self._clock()
        self._cost = now - start
        self._interval_seconds += self._cost
        self._seconds += self._cost
        self._warn_if_costly(now - self._start)

    def take_milliseconds(self) -> float:
        """Return what cleaning took since the last call."""
        milliseconds, self._interval_seconds = self._interval_seconds * 1e3, 0.0
        return milliseconds

    def _warn_if_costly(self, run_seconds: float) -> None:
        share = self._seconds / max(run_seconds, 1e-9)
        if self.cleanings < _WORTH_SAYING or share <= _MAX_SHARE:
            return
        if self._alarm.rings(self._seconds):
            log.warning(
                "clearing caches took %.1f %% of the run so far (%d times): raise "
                "memory.cache.every_updates or memory.cache.min_reclaimable_mb",
                100 * share,
                self.cleanings,
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


def trim() -> None:
    """Hand freed memory back that the allocator of C keeps: milliseconds, more with a torn heap.

    glibc keeps what lies below a block in use, and up to 64 MB besides; others have no such call.
    """
    hand_back = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if hand_back is not None:
        hand_back(0)
