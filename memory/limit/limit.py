"""The memory limit of a run: what is done as it nears, and the error that ends the run at it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import NoReturn

from steadyrl.core.errors import MemoryBudgetError
from steadyrl.memory.bounds import Bound
from steadyrl.memory.limit.forecast import LONGEST_WAIT, Forecast
from steadyrl.memory.limit.holders import Holders, higher_limit
from steadyrl.memory.limit.meters import BoundsMeter, Level, OwnMeter
from steadyrl.memory.limit.trainers import LastMinuteGrowth, Trainers
from steadyrl.memory.process import MB, readable

log = logging.getLogger("steadyrl")

CLEARLY = 0.95  # of the limit: a cleaning that leaves more is the last one
OVERDRAFT = 0.75  # of the margin: into which trainers go on while another one ends
ABATED = 0.80  # of the limit: the run is no longer near
GROWN = 0.02  # of the limit: growth after which an exact reading is repeated sooner
_PATIENCE = 200  # a reading is repeated after at least this many times its own time
_SHARED_EVERY = 1.0  # seconds between two looks at other trainers and at this run's growth


class MemoryLimit:
    """Watches one meter; `check` costs a tenth of a microsecond until a reading is due."""

    def __init__(
        self,
        meter: BoundsMeter | OwnMeter | None,
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
        self._growth = LastMinuteGrowth(now - max(0.0, time.time() - self._trainers.started))
        self._forecast = Forecast()
        self._warned = self._cleaned_in_vain = self._ended = False
        self._grown_text = ""
        self._minute = 0  # this run's growth in the last minute
        self._confirm_due, self._confirmed = -math.inf, 0  # when the last exact reading is outdated
        self._overdraft = 0.0  # bytes above the limit, while a trainer that grew more ends first
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
            self._forecast.begin(self._clock(), level.bound)
            self._holders.begin(level)

    def close(self) -> None:
        """Leave the list of trainers, unless this one ends so that the others can go on."""
        if not self._ended:
            self._trainers.close()

    def _check(self, now: float) -> None:
        assert self._meter is not None
        level, cost = self._timed(self._meter.read)
        if level is None:
            self._due = now + LONGEST_WAIT
            return
        late = max(0.0, now - self._due)
        wait, growth = self._forecast.update(level, now, late=late, least_wait=_PATIENCE * cost)
        self._due = now + wait
        if now >= self._next_sample:
            self._next_sample = now + _SHARED_EVERY
            self._minute = self._growth.add(now, self._kept())
            self._choose_which_trainer_ends(level)
        if level.bound.used + growth >= level.limit:  # perhaps another trainer ends by now
            self._choose_which_trainer_ends(level)
        if self._is_full(level, growth) or (not self._warned and level.is_near):
            self._act(level, growth)

    def _is_full(self, level: Level, growth: int) -> bool:
        return level.bound.used + growth >= level.limit + self._overdraft

    def _act(self, level: Level, growth: int) -> None:
        """Warn once that the limit is near, clean, and end the run at the limit."""
        assert self._meter is not None
        now, used = self._clock(), level.bound.used
        if now < self._confirm_due and used < self._confirmed + GROWN * level.limit:
            return
        exact, cost = self._timed(self._meter.confirm)  # a reading may be an estimate
        self._confirm_due, self._confirmed = now + _PATIENCE * cost, used
        level = exact or level
        if not self._warned and (level.is_near or self._is_full(level, growth)):
            self._warn(level)
            level = self._clean_up(level)
        elif self._is_full(level, growth) and not self._cleaned_in_vain:
            level = self._clean_up(level)
        if self._is_full(level, growth):
            self._end(level, growth)

    def _timed(self, read: Callable[[], Level | None]) -> tuple[Level | None, float]:
        """Return a reading, and the CPU seconds it took."""
        start = self._effort()
        return read(), self._effort() - start

    def _choose_which_trainer_ends(self, level: Level) -> None:
        """Find out which trainer ends first where the bound is shared by several."""
        if not level.bound.shared or level.bound.used < ABATED * level.limit:
            self._overdraft = 0.0
            self._trainers.close()
            return
        part = self._trainers.publish(_name(level.bound), self._minute)
        # The rest of the margin stays for saving, whatever the others do.
        self._overdraft = OVERDRAFT * level.margin * part

    def _warn(self, level: Level) -> None:
        self._warned = self.wants_save = True
        held = self._holders.read(level)
        self._grown_text = self._holders.grown(held)
        log.warning(
            "memory is near its limit: %s. %s. %sA checkpoint is saved now; at the limit the run "
            "is saved and ends (exit 7)",
            described(level),
            self._holders.held(held),
            self._grown_text,
        )

    def _clean_up(self, level: Level) -> Level:
        assert self._meter is not None
        self._clean()
        level = self._meter.confirm() or level
        # Else the run would do nothing but clean.
        self._cleaned_in_vain = level.bound.used > CLEARLY * level.limit
        return level

    def _end(self, level: Level, growth: int) -> NoReturn:
        soon = f", and {readable(growth)} more by the next step" if growth > 2 * MB else ""
        if level.bound.shared:
            self._trainers.publish(_name(level.bound), self._minute, ends=True)
        self._ended, self._due = True, math.inf  # no more readings while the run is saved
        held = self._holders.read(level)
        error = MemoryBudgetError(
            f"{described(level, reached=True)}{soon}. {self._holders.held(held)}. "
            f"{self._grown_text}{self._holders.remedy(held, level)}"
        )
        error.overrides = (higher_limit(level),) if level.is_own else ()
        raise error


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
