"""The memory limit of a run: what is done as it nears, and the error that ends the run at it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import NoReturn

from steadyrl.core.errors import MemoryBudgetError
from steadyrl.memory.bounds import Bound
from steadyrl.memory.limit.holders import Holders
from steadyrl.memory.limit.meters import Level, Meter
from steadyrl.memory.limit.trainers import Growth, Trainers
from steadyrl.memory.process import MB, readable

log = logging.getLogger("steadyrl")

NEAR = 0.85  # of the limit: warn, clean and save, once
CLEARLY = 0.95  # of the limit: a cleaning that leaves more is the last one
ROOM = 0.75  # of the margin: into which trainers go on while another one ends
ABATED = 0.80  # of the limit: the run is no longer near
GROWN = 0.02  # of the limit: growth after which an exact reading is repeated sooner
# A reading is repeated before memory that grows as fast as pages can be touched reaches the limit,
# but after this many times its own time; always after _LONGEST.
_PATIENCE = 200
_FASTEST = 2e9  # bytes per second
_LONGEST = 0.25  # seconds
_SHARED_EVERY = 1.0  # seconds between two looks at other trainers and at this run's growth


class MemoryLimit:
    """Watches one meter; `check` costs a tenth of a microsecond until a reading is due."""

    def __init__(
        self,
        meter: Meter | None,
        *,
        clean: Callable[[], None],
        kept: Callable[[], int],
        holders: Holders,
        trainers: Trainers | None = None,
        clock: Callable[[], float],
        effort: Callable[[], float] = time.thread_time,
    ) -> None:
        """Start; without a meter there is no limit. `kept` returns the bytes this run holds now."""
        self._meter, self._clean, self._kept = meter, clean, kept
        self._holders = holders
        self._trainers = trainers or Trainers()
        self._clock, self._effort = clock, effort
        now = clock()
        self._due = math.inf if meter is None else now
        self._next_sample = now
        self._growth = Growth(now - max(0.0, time.time() - self._trainers.started))
        self._rates = (0.0, 0.0)  # bytes per second, over the last two intervals
        self._late = (0.0, 0.0)  # seconds by which the last two readings came late: long steps
        self._last: tuple[float, Bound] | None = None  # the last reading
        self._said = self._spent = self._ends = False
        self._grown_text = ""
        self._minute = 0  # this run's growth in the last minute
        self._confirm_due, self._confirmed = -math.inf, 0  # when the last exact reading is outdated
        self._room = 0.0  # above the limit, while a trainer that grew more is to end first
        self.wants_save = False  # reset by whoever saves
        self.begin()

    def check(self) -> None:
        """Read if it is due; raise MemoryBudgetError at the limit."""
        now = self._clock()
        if now >= self._due:
            self._check(now)

    def begin(self) -> None:
        """Take what is used now for no growth: at the start, and when learning begins."""
        level = None if self._meter is None else self._meter.read()
        if level is not None:
            self._last = self._clock(), level.bound
            self._holders.begin(level)

    def close(self) -> None:
        """Leave the list of trainers, unless this one ends so that the others can go on."""
        if not self._ends:
            self._trainers.close()

    def _check(self, now: float) -> None:
        assert self._meter is not None
        level, cost = self._timed(self._meter.read)
        if level is None:
            self._due = now + _LONGEST
            return
        expected = self._expect(level, now, _PATIENCE * cost)
        if now >= self._next_sample:
            self._next_sample = now + _SHARED_EVERY
            self._minute = self._growth.add(now, self._kept())
            self._share(level)
        if level.bound.used + expected >= level.limit:  # perhaps another trainer ends by now
            self._share(level)
        if not self._said or self._is_full(level, expected):
            self._look_closely(level, expected)

    def _is_full(self, level: Level, expected: int) -> bool:
        return level.bound.used + expected >= level.limit + self._room

    def _look_closely(self, level: Level, expected: int) -> None:
        """Say once that the limit is near; end the run at it."""
        assert self._meter is not None
        if level.bound.used < NEAR * level.limit and not self._is_full(level, expected):
            return
        now, used = self._clock(), level.bound.used
        if now < self._confirm_due and used < self._confirmed + GROWN * level.limit:
            return
        exact, cost = self._timed(self._meter.confirm)  # a reading may be an estimate
        self._confirm_due, self._confirmed = now + _PATIENCE * cost, used
        level = exact or level
        if self._said:
            if self._is_full(level, expected) and not self._spent:
                level = self._cleaned(level)
        elif level.bound.used >= NEAR * level.limit or self._is_full(level, expected):
            self._near(level)
            level = self._cleaned(level)
        if self._is_full(level, expected):
            self._end(level, expected)

    def _timed(self, read: Callable[[], Level | None]) -> tuple[Level | None, float]:
        """Return a reading, and the CPU seconds it took."""
        start = self._effort()
        return read(), self._effort() - start

    def _expect(self, level: Level, now: float, rest: float) -> int:
        """Return the bytes that memory will have grown by at the next reading; set its time.

        It counts as growing only if it grew over both of the last intervals: a jump is over. But
        near the limit a second one must not reach that of the control group, where the kernel
        kills.
        """
        used, jump = level.bound.used, 0
        if self._last is not None:
            then, before = self._last
            seconds = max(now - then, 1e-6)
            if (before.group or before.name) == (level.bound.group or level.bound.name):
                jump = used - before.used
            else:  # another bound has the least left: that is no growth
                self._rates = (0.0, 0.0)
            self._rates = (self._rates[1], jump / seconds)
            self._late = (self._late[1], max(0.0, now - self._due))
        self._last = now, level.bound
        wait = min(_LONGEST, max(rest, max(0, level.free) / _FASTEST))
        self._due = now + wait
        grows = int(max(0.0, min(self._rates)) * (wait + max(self._late)))
        kills = level.bound.group is not None and used + jump >= level.bound.limit
        return max(grows, jump) if kills and used >= NEAR * level.limit else grows

    def _share(self, level: Level) -> None:
        """Find out which trainer ends first where the bound is shared by several."""
        if not level.bound.shared or level.bound.used < ABATED * level.limit:
            self._room = 0.0
            self._trainers.close()
            return
        part = self._trainers.publish(_name(level.bound), self._minute)
        # The rest of the margin stays for saving, whatever the others do.
        self._room = ROOM * level.margin * part

    def _near(self, level: Level) -> None:
        self._said = self.wants_save = True
        self._grown_text = self._holders.grown(level)
        log.warning(
            "memory is near its limit: %s. %s. %sA checkpoint is saved now; at the limit the run "
            "is saved and ends (exit 7)",
            described(level),
            self._holders.held(level),
            self._grown_text,
        )

    def _cleaned(self, level: Level) -> Level:
        assert self._meter is not None
        self._clean()
        level = self._meter.confirm() or level
        # Cleaning again and again would keep a run alive that does nothing else.
        self._spent = level.bound.used > CLEARLY * level.limit
        return level

    def _end(self, level: Level, expected: int) -> NoReturn:
        soon = f", and {readable(expected)} more by the next step" if expected > 2 * MB else ""
        if level.bound.shared:
            self._trainers.publish(_name(level.bound), self._minute, ends=True)
        self._ends, self._due = True, math.inf  # said once: what is measured while saving counts
        raise MemoryBudgetError(
            f"{described(level, reached=True)}{soon}. {self._holders.held(level)}. "
            f"{self._grown_text}Raise the limit, or lower agent.replay.capacity or env.num_envs"
        )


def _name(bound: Bound) -> str:
    return str(bound.group or "machine")


def described(level: Level, *, reached: bool = False) -> str:
    """Return how much is used of which limit, and whether that is reached."""
    used, limit = readable(level.bound.used), readable(level.limit)
    name = level.bound.name
    if not level.bound.shared and not level.margin:
        return f"{name} is reached: {used} are used" if reached else f"{used} are used of {name}"
    text = (
        f"{used} are used of {limit} ({name}, less {readable(level.margin)} to save the run with)"
    )
    return f"the memory limit is reached: {text}" if reached else text
