"""When something is due, and how long a run took."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

from typing_extensions import override

from memory.saved import COUNT, Limits, Saved
from memory.state import Stateful

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


class Pace(Stateful):
    """Let so many through at once, and of the rest one a second: what runs for days stays small."""

    state_names = ("passed",)
    state_limits: ClassVar[Mapping[str, Limits]] = {"passed": COUNT}

    def __init__(self, at_once: int = 10_000) -> None:
        self._at_once = at_once
        self.passed = 0

    def allows(self, seconds: float) -> bool:
        """Return whether one more may pass, so long after the beginning; if so, count it."""
        if self.passed >= self._at_once + seconds:
            return False
        self.passed += 1
        return True


class Mark(NamedTuple):
    """Where a run stood when its speed was taken last."""

    seconds: float
    steps: int
    updates: int


class Speed(Stateful):
    """Steps and updates a second since it was asked last."""

    state_names = ("_mark",)
    state_limits: ClassVar[Mapping[str, Limits]] = {"_mark": COUNT}

    def __init__(self) -> None:
        self._mark = Mark(0.0, 0, 0)

    def take(self, seconds: float, steps: int, updates: int) -> tuple[float, float]:
        """Return steps a second and updates a second; from now on count anew."""
        last, self._mark = self._mark, Mark(seconds, steps, updates)
        passed = max(seconds - last.seconds, 1e-9)
        return (steps - last.steps) / passed, (updates - last.updates) / passed


class Stopwatch(Stateful):
    """Seconds of a run, those before it was interrupted included; pauses are no training."""

    def __init__(self) -> None:
        self._pace, self._speed = Pace(), Speed()
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

    def lets_pass(self) -> bool:
        """Return whether one more line may be logged; if so, count it."""
        return self._pace.allows(self.seconds)

    def speed(self, steps: int, updates: int) -> tuple[float, float]:
        """Return steps and updates a second of training since the last call."""
        return self._speed.take(self.training, steps, updates)

    @override
    def state_dict(self) -> dict[str, Any]:
        parts = {"pace": self._pace.state_dict(), "speed": self._speed.state_dict()}
        return {"seconds": self.seconds, "paused": self._paused, **parts}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = Saved(state, "a stopwatch")
        self._begin = time.perf_counter()
        self._before = saved.real("seconds", 0, LONGEST)
        self._paused = saved.real("paused", 0, LONGEST)
        self._pace.load_state_dict(saved.raw("pace"))
        self._speed.load_state_dict(saved.raw("speed"))
