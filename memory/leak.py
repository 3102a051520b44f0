"""Tell growth that does not stop from growth that settles, and name what grows."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

from memory.census import Census, growers
from memory.growth import Doubling, Growth
from memory.process import Tree
from memory.settings import LeakSettings
from memory.units import MB, readable

_HANDLES = {
    "threads": "a thread that is started anew and never joined",
    "children": "a child process (an environment's worker?) that is never closed",
    "open_files": "a file, socket or pipe that is opened and never closed",
}


_TREND_SAMPLES = 8  # below that, a slope is a guess


class LeakDetector:
    """Watch bytes (host, accelerator) and handles; speak once per doubling.

    Bytes leak when they have grown by `max_growth_mb` since the warm-up and still rise, or rise
    by more than `max_growth_mb_per_million_steps` and a quarter of `max_growth_mb` in the window.
    """

    def __init__(
        self,
        settings: LeakSettings,
        census: Callable[[], Census],
        affordable: Callable[[], bool] = lambda: True,
    ) -> None:
        """Take `census` to compare with after the warm-up, once it is `affordable`."""
        self._settings, self._census, self._affordable = settings, census, affordable
        self._warm = False
        self._bytes: dict[str, tuple[Growth, Doubling]] = {}
        self._handles: dict[str, tuple[int, Doubling]] = {}
        self._before: Census | None = None
        self._lines: tracemalloc.Snapshot | None = None
        self._tracing = settings.tracemalloc and not tracemalloc.is_tracing()
        if self._tracing:
            tracemalloc.start()

    def observe_bytes(self, name: str, step: int, nbytes: int) -> str | None:
        """Take a sample of memory in use; return a warning if it is due."""
        growth, bell = self._bytes.setdefault(name, (self._new_growth(), Doubling()))
        growth.add(step, nbytes)
        self._warm = self._warm or growth.warm
        leaks = self._leaks(growth)
        if self._warm and self._before is None and (leaks or self._affordable()):
            # A leak that comes this early is told at the next sample, with what grew until then.
            self._remember()
            return None
        if not leaks or not bell.rings(growth.total):
            return None
        return (
            f"{name} memory grew by {readable(growth.total)} since step {growth.since_step:,} "
            f"and grows by {growth.slope * 1e6 / MB:,.0f} MB per million steps (step {step:,}). "
            f"{self._names()}"
        )

    def observe_tree(self, tree: Tree) -> list[str]:
        """Take a reading of threads, children and open files; return what is to be said."""
        if not self._warm:
            return []
        warnings = []
        for name, hint in _HANDLES.items():
            count = getattr(tree, name)
            baseline, bell = self._handles.setdefault(name, (count, Doubling()))
            more = count - baseline
            if more > self._settings.max_extra_handles and bell.rings(more):
                words = name.replace("_", " ")
                warnings.append(
                    f"{count} {words} are {more} more than after the warm-up: look for {hint}. "
                    f"{self._names()}"
                )
        return warnings

    def slope(self, name: str) -> float:
        """Return the growth in MB per million steps."""
        return self._bytes[name][0].slope * 1e6 / MB if name in self._bytes else 0.0

    def close(self) -> None:
        """Stop tracing if it was started here, and forget what was counted."""
        if self._tracing:
            tracemalloc.stop()
            self._tracing = False
        self._before = self._lines = None

    def _new_growth(self) -> Growth:
        settings = self._settings
        return Growth(warmup=settings.warmup_samples, window=settings.window_samples)

    def _leaks(self, growth: Growth) -> bool:
        settings, slope = self._settings, growth.slope
        limit = settings.max_growth_mb * MB
        if slope <= 0 or growth.samples < min(_TREND_SAMPLES, settings.window_samples):
            return False
        steep = slope * 1e6 / MB > settings.max_growth_mb_per_million_steps
        return growth.total > limit or (steep and min(growth.total, growth.in_window) > limit / 4)

    def _remember(self) -> None:
        """Count what is there, to compare with when something grows."""
        self._before = self._census()
        if tracemalloc.is_tracing():
            self._lines = tracemalloc.take_snapshot()

    def _names(self) -> str:
        if self._before is None:
            return "It is too early to say what grew."
        found = growers(self._before)
        if self._lines is not None:
            found += _grown_lines(self._lines)
            knob = "memory.leak.action=stop ends the run here"
        else:
            knob = (
                "memory.leak.tracemalloc=true names the lines of code, "
                "memory.leak.action=stop ends the run here"
            )
        if not found:
            found = [
                "no Python object: a library's own memory, or the allocator's "
                "(try MALLOC_ARENA_MAX=2, or a smaller memory.cache.min_reclaimable_mb)"
            ]
        return f"What grew: {'; '.join(found)}. {knob}"


def _grown_lines(before: tracemalloc.Snapshot) -> list[str]:
    now = tracemalloc.take_snapshot().filter_traces(
        [tracemalloc.Filter(False, tracemalloc.__file__)]
    )
    return [
        f"{line.traceback[0].filename}:{line.traceback[0].lineno} +{readable(line.size_diff)}"
        for line in now.compare_to(before, "lineno")[:4]
        if line.size_diff > 0
    ]
