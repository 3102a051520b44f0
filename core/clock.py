"""When something is due, and how long a run took."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

from typing_extensions import override

from steadyrl.core.saved_state import COUNT, Limits, Saved
from steadyrl.core.state import Stateful

LONGEST = 1e11  # seconds of a run: thousands of years


class Interval(Stateful):
    """Fire once for every crossing of a multiple of `every`; 0 never fires."""

    state_names = ("next",)

    def __init__(self, every: int) -> None:
        self._every = every
        self.next = every if every else None

    def due(self, step: int) -> bool:
        """Return whether a multiple was reached since the last call; several count as one."""
        if not self.reached(step):
            return False
        self.next = (step // self._every + 1) * self._every
        return True

    def reached(self, step: int) -> bool:
        """Return the same, and leave it so."""
        return self.next is not None and step >= self.next

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the next step back; with another `every` it is the next multiple of that."""
        saved = Saved(state, "an interval")
        following = None if saved.raw("next") is None else saved.whole("next")
        if self.next is not None and following is not None:
            self.next = self._every * -(-following // self._every)


class RateLimiter(Stateful):
    """Let so many through at once, and of the rest one a second: what runs for days stays small."""

    state_names = ("allowed",)
    state_limits: ClassVar[Mapping[str, Limits]] = {"allowed": COUNT}

    def __init__(self, burst: int = 10_000) -> None:
        self._burst = burst
        self.allowed = 0

    def allows(self, seconds: float) -> bool:
        """Return whether one more may pass, so long after the beginning; if so, count it."""
        if self.allowed >= self._burst + seconds:
            return False
        self.allowed += 1
        return True


class Progress(NamedTuple):
    """Where a run stood when its speed was taken last."""

    seconds: float
    steps: int
    updates: int


class Throughput(Stateful):
    """Steps and updates a second since it was asked last."""

    state_names = ("_last",)
    state_limits: ClassVar[Mapping[str, Limits]] = {"_last": COUNT}

    def __init__(self) -> None:
        self._last = Progress(0.0, 0, 0)

    def take(self, seconds: float, steps: int, updates: int) -> tuple[float, float]:
        """Return steps a second and updates a second; from now on count anew."""
        last, self._last = self._last, Progress(seconds, steps, updates)
        allowed = max(seconds - last.seconds, 1e-9)
        return (steps - last.steps) / allowed, (updates - last.updates) / allowed


class StepRate:
    """How fast steps are made from here on, of which the time left is told.

    Compilers hold up the first rows and the first update of a process: what was before that update,
    or before it was first asked, does not count. Where steps wait for updates, as PPO's do, only a
    time within which there was an update counts.
    """

    def __init__(self) -> None:
        self._first: int | None = None  # updates after the first row
        self._last: Progress | None = None
        self._rate = 0.0
        self.has_updated = False

    def on_timestep(self, seconds: float, steps: int, updates: int) -> None:
        """Note that a row is over; once it `has_updated` there is nothing to note any more."""
        if self._first is None:
            self._first = updates
        elif updates > self._first and not self.has_updated:
            self._last, self._rate, self.has_updated = Progress(seconds, steps, updates), 0.0, True

    def take(self, seconds: float, steps: int, updates: int) -> float:
        """Return steps a second of training since it was asked last; 0 while nobody knows."""
        last, now = self._last, Progress(seconds, steps, updates)
        if last is None:
            self._last = now
        elif steps > last.steps and (updates > last.updates or not self.has_updated):
            self._last = now
            self._rate = (steps - last.steps) / max(seconds - last.seconds, 1e-9)
        return self._rate


class Stopwatch(Stateful):
    """Seconds of a run, those before it was interrupted included; pauses are no training."""

    def __init__(self) -> None:
        self._log_limiter, self._throughput, self._step_rate = (
            RateLimiter(),
            Throughput(),
            StepRate(),
        )
        self._begin = time.perf_counter()
        self._before = self._paused = 0.0

    @property
    def seconds(self) -> float:
        """Return all seconds."""
        return self._before + time.perf_counter() - self._begin

    @property
    def training(self) -> float:
        """Return the seconds outside of pauses."""
        return self.seconds - self._paused

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Count what happens inside as a pause."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - begin

    def may_log(self) -> bool:
        """Return whether one more line may be logged; if so, count it."""
        return self._log_limiter.allows(self.seconds)

    def speed(self, steps: int, updates: int) -> tuple[float, float]:
        """Return steps and updates a second of training since the last call."""
        return self._throughput.take(self.training, steps, updates)

    def on_timestep(self, steps: int, updates: int) -> None:
        """Note that a row is over: what was compiled for the first ones is no measure."""
        if not self._step_rate.has_updated:
            self._step_rate.on_timestep(self.training, steps, updates)

    def expected_steps_per_second(self, steps: int, updates: int) -> float:
        """Return how many steps a second are to be expected; 0 while nobody knows."""
        return self._step_rate.take(self.training, steps, updates)

    @override
    def state_dict(self) -> dict[str, Any]:
        parts = {
            "log_limiter": self._log_limiter.state_dict(),
            "throughput": self._throughput.state_dict(),
        }
        return {"seconds": self.seconds, "paused": self._paused, **parts}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = Saved(state, "a stopwatch")
        self._begin = time.perf_counter()
        self._before = saved.real("seconds", 0, LONGEST)
        self._paused = saved.real("paused", 0, LONGEST)
        self._log_limiter.load_state_dict(saved.raw("log_limiter"))
        self._throughput.load_state_dict(saved.raw("throughput"))
