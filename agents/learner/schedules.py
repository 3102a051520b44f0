"""Scheduled hyperparameters in closed form; importable without torch.

They depend on valid environment steps, so they do not depend on the number of environments.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from steadyrl.core.errors import SettingError, validate_fraction, validate_non_negative

Curve = Literal["constant", "linear", "cosine"]


class Schedule(NamedTuple):
    """A number that rises linearly from 0 to `start`, stays there, then goes to `end`."""

    start: float
    end: float
    shape: Curve
    steps: float  # from `start` to `end`
    warmup: float = 0.0  # steps in which it rises from 0
    delay: float = 0.0  # steps after the warm-up in which it stays at `start`

    def at(self, now: int, ahead: int = 0) -> float:
        """Return the value after `now` steps.

        `ahead`: steps that the value is used for. A warm-up counts them, so it never returns 0.
        """
        if now < self.warmup:
            return self.start * min(1.0, (now + ahead) / self.warmup)
        since = now - self.warmup - self.delay
        if since < 0 or self.shape == "constant":
            return self.start
        between = linear if self.shape == "linear" else cosine
        return between(self.start, self.end, self.steps, since)


def linear(start: float, end: float, steps: float, now: float) -> float:
    """Return start + (end − start)·min(1, now / steps); exactly `end` from `steps` on."""
    if now >= steps:
        return end
    return start + (end - start) * (now / steps)


def cosine(start: float, end: float, steps: float, now: float) -> float:
    """Return end + (start − end)·½(1 + cos(π·min(1, now / steps))) (Loshchilov & Hutter 2017)."""
    if now >= steps:
        return end
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * now / steps))


def over_the_run(
    shape: Curve, start: float, end: float, warmup: float, total_steps: int
) -> Schedule:
    """Return a schedule over a whole run: a warm-up to `start`, then an anneal to `end`."""
    rising = warmup * total_steps
    return Schedule(start, end, shape, total_steps - rising, rising)


def validate_schedules(settings: object, *names: str) -> None:
    """Validate the schedules NAME: `NAME_end`, `NAME_warmup` and `anneal_NAME`."""
    for name in names:
        end, warmup = f"{name}_end", f"{name}_warmup"
        validate_non_negative(settings, end)
        validate_fraction(settings, warmup)
        if getattr(settings, warmup) == 1:
            raise SettingError(warmup, 1, "must be below 1: the warm-up would take the whole run")
        if getattr(settings, f"anneal_{name}") == "constant" and getattr(settings, end):
            raise SettingError(
                end,
                getattr(settings, end),
                f"is never reached with agent.anneal_{name}=constant: make that linear or cosine",
            )
