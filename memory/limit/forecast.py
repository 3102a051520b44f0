"""When memory is read next, and how much it will have grown by then."""

from __future__ import annotations

from steadyrl.memory.bounds import Bound
from steadyrl.memory.limit.meters import Level

# Memory is read again before it could reach the limit by growing as fast as pages can be touched.
_FASTEST = 2e9  # bytes per second
LONGEST_WAIT = 0.25  # seconds


class Forecast:
    """Growth of memory from its last readings."""

    def __init__(self) -> None:
        self._last: tuple[float, Bound] | None = None  # the last reading
        self._rates = (0.0, 0.0)  # bytes per second, over the last two intervals
        self._late = (0.0, 0.0)  # seconds by which the last two readings came late: long steps

    def begin(self, now: float, bound: Bound) -> None:
        """Measure growth from here on."""
        self._last = now, bound

    def update(
        self, level: Level, now: float, *, late: float, least_wait: float
    ) -> tuple[float, int]:
        """Return the seconds to the next reading, and the bytes by which memory will have grown.

        It counts as growing only if it grew over both of the last intervals: a jump is over. But
        near the limit a second one must not reach that of the control group, where the kernel
        kills.
        """
        used, jump = level.bound.used, 0
        if self._last is not None:
            then, before = self._last
            if (before.group or before.name) == (level.bound.group or level.bound.name):
                jump = used - before.used
            else:  # another bound has the least left: that is no growth
                self._rates = (0.0, 0.0)
            self._rates = (self._rates[1], jump / max(now - then, 1e-6))
            self._late = (self._late[1], late)
        self._last = now, level.bound
        wait = min(LONGEST_WAIT, max(least_wait, max(0, level.free) / _FASTEST))
        growth = int(max(0.0, min(self._rates)) * (wait + max(self._late)))
        kernel_kills = level.bound.group is not None and used + jump >= level.bound.limit
        return wait, max(growth, jump) if kernel_kills and level.is_near else growth
