"""Intervals, rate limits, and timing of a run and its phases."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from statistics import median_high
from typing import Any, ClassVar, NamedTuple

from typing_extensions import override

from steadyrl.core.saved_state import COUNT, Limits, Saved
from steadyrl.core.state import Stateful, restore, to_plain

LONGEST = 1e11  # seconds; bound of saved times
DAY = 86_400.0  # seconds

# A phase that begins again this soon goes on: compilation of one function after another is one.
SECONDS_BETWEEN = 1.0


class Interval(Stateful):
    """Fires once for every crossing of a multiple of `every`; 0: never."""

    state_names = ("next",)

    def __init__(self, every: int) -> None:
        self._every = every
        self.next = every if every else None

    def pop_due(self, step: int) -> bool:
        """Return whether a multiple was crossed since the last call; several count as one."""
        if not self.is_due(step):
            return False
        self.next = (step // self._every + 1) * self._every
        return True

    def is_due(self, step: int) -> bool:
        """Return what `pop_due` would, without advancing to the next multiple."""
        return self.next is not None and step >= self.next

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the next multiple; if `every` has changed, round up to a multiple of it."""
        saved = Saved(state, "an interval")
        following = None if saved.raw("next") is None else saved.whole("next")
        if self.next is not None and following is not None:
            self.next = self._every * -(-following // self._every)


class RateLimiter(Stateful):
    """Rate limit that keeps the logs of long runs small.

    `burst` events at any time, then one per second; after a day, one per 86,400th of the time so
    far: every 30 seconds after a month.
    """

    state_names = ("allowed",)
    state_limits: ClassVar[Mapping[str, Limits]] = {"allowed": COUNT}

    def __init__(self, burst: int = 10_000) -> None:
        self._burst = burst
        self.allowed = 0

    def allows(self, seconds: float) -> bool:
        """Return whether one more event is allowed `seconds` after the start; if so, count it."""
        later = DAY * math.log(max(seconds / DAY, 1.0))  # the integral of that rate
        most = self._burst + min(seconds, DAY) + later
        if self.allowed >= most:
            return False
        self.allowed += 1
        return True


class Progress(NamedTuple):
    """Progress of a run when its speed was last measured."""

    seconds: float
    steps: int
    updates: int


class StepRate:
    """Expected steps per second, from which the remaining time is estimated.

    Compilation delays a process's first steps and its first update, so time before that update (or
    before the first call of `take`) is not counted. Once updates have started, only intervals that
    contain an update count, because PPO's steps wait for its updates. The median of the last
    intervals leaves out one in which the process was suspended.
    """

    def __init__(self) -> None:
        self._first: int | None = None  # updates after the first timestep
        self._last: Progress | None = None
        self._rates: deque[float] = deque(maxlen=5)
        self.has_updated = False

    def on_timestep(self, seconds: float, steps: int, updates: int) -> None:
        """Record that a timestep ended; no effect once `has_updated` is True."""
        if self._first is None:
            self._first = updates
        elif updates > self._first and not self.has_updated:
            self._last, self.has_updated = Progress(seconds, steps, updates), True
            self._rates.clear()

    def take(self, seconds: float, steps: int, updates: int) -> float:
        """Return the newest estimate of steps per second; 0: unknown yet."""
        last, now = self._last, Progress(seconds, steps, updates)
        if last is None:
            self._last = now
        elif steps > last.steps and (updates > last.updates or not self.has_updated):
            self._last = now
            self._rates.append((steps - last.steps) / max(seconds - last.seconds, 1e-9))
        return median_high(self._rates) if self._rates else 0.0


class Stopwatch(Stateful):
    """Measures a run's wall-clock time across resumes, and its training time without pauses."""

    def __init__(self, log_limiter: RateLimiter | None = None) -> None:
        self._log_limiter = log_limiter or RateLimiter()
        self._last = Progress(0.0, 0, 0)
        self._begin = time.perf_counter()
        self._before = self._paused = 0.0

    @property
    def seconds(self) -> float:
        """Seconds since the run's first start, interruptions excluded."""
        return self._before + time.perf_counter() - self._begin

    @property
    def training(self) -> float:
        """Seconds without pauses (evaluation, saving)."""
        return self.seconds - self._paused

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Count the time inside as a pause."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - begin

    def may_log(self) -> bool:
        """Return whether one more line may be logged (rate limit); if so, count it."""
        return self._log_limiter.allows(self.seconds)

    @property
    def steps(self) -> int:
        """Steps of the run at the last call of `speed`."""
        return self._last.steps

    def speed(self, steps: int, updates: int) -> tuple[float, float]:
        """Return steps and updates per second of training since the last call."""
        last, self._last = self._last, Progress(self.training, steps, updates)
        passed = max(self._last.seconds - last.seconds, 1e-9)
        return (steps - last.steps) / passed, (updates - last.updates) / passed

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "paused": self._paused,
            "log_limiter": self._log_limiter.state_dict(),
            "last": to_plain(self._last),
        }

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = Saved(state, "a stopwatch")
        self._begin = time.perf_counter()
        self._before = saved.real("seconds", 0, LONGEST)
        self._paused = saved.real("paused", 0, LONGEST)
        self._log_limiter.load_state_dict(saved.raw("log_limiter"))
        self._last = restore(self._last, saved.raw("last"), COUNT)


class Phase(NamedTuple):
    """What a run is doing while no step is taken: compiling, evaluating, loading."""

    what: str
    begun: float  # on the activity's clock
    logged: bool  # whoever began it has logged a line of its own
    progress: str = ""  # how far it has come


class Activity:
    """The running phases of a thread, innermost last, and their seconds.

    Any layer marks a phase by `with doing("…"):`; a display reads them from another thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.phases: tuple[Phase, ...] = ()  # replaced, never changed
        self._over = 0.0  # seconds in phases that have ended
        self._since = 0.0  # when the outermost running one began
        self._last, self._begun, self._ended = "", 0.0, float("-inf")

    def begin(self, what: str, *, logged: bool = False) -> None:
        """Begin a phase inside the running ones."""
        now = self.clock()
        goes_on = what == self._last and now - self._ended < SECONDS_BETWEEN
        begun = self._begun if goes_on else now
        if not self.phases:
            self._since = now
        self.phases = (*self.phases, Phase(what, begun, logged))

    def report(self, progress: str) -> None:
        """Note how far the innermost phase has come."""
        if self.phases:
            *outer, last = self.phases
            self.phases = (*outer, last._replace(progress=progress))

    def end(self) -> None:
        """End the innermost phase."""
        now, (*outer, ended) = self.clock(), self.phases
        if not outer:
            self._over += now - self._since
        self.phases = tuple(outer)
        self._last, self._begun, self._ended = ended.what, ended.begun, now

    @property
    def seconds(self) -> float:
        """Seconds spent in phases so far."""
        return self._over + (self.clock() - self._since if self.phases else 0.0)


_SHOWN: ContextVar[Activity | None] = ContextVar("activity", default=None)


@contextmanager
def shown_by(activity: Activity) -> Iterator[None]:
    """Let `doing` report to this activity, in this thread."""
    token = _SHOWN.set(activity)
    try:
        yield
    finally:
        _SHOWN.reset(token)


def seconds_in_phases() -> float:
    """Return the seconds that this thread's display has seen in phases; 0 without one."""
    activity = _SHOWN.get()
    return 0.0 if activity is None else activity.seconds


@contextmanager
def doing(what: str, *, logged: bool = False) -> Iterator[None]:
    """Mark a phase of the run, such as "evaluating"; without a display do nothing.

    `logged`: a line about it is in the log already.
    """
    activity = _SHOWN.get()
    if activity is None:
        yield
        return
    activity.begin(what, logged=logged)
    try:
        yield
    finally:
        activity.end()


def report_progress(text: str) -> None:
    """Let a display add this to the running phase, such as "7 played"."""
    activity = _SHOWN.get()
    if activity is not None:
        activity.report(text)
