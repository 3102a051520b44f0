"""Scheduled hyperparameters in closed form, and when updates are due; importable without torch.

Both depend on valid environment steps, so they do not depend on the number of environments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from typing import ClassVar, Literal, NamedTuple

from steadyrl.core.errors import SettingError, validate_fraction, validate_non_negative
from steadyrl.core.saved_state import COUNT, Limits
from steadyrl.core.state import Stateful

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


class Due(Enum):
    """What is due at a step."""

    GRADIENT_STEP = auto()
    TARGET_UPDATE = auto()


class UpdateClock(Stateful):
    """Count environment steps, and the updates done of those that are due.

    After `learning_starts` steps, `updates_per_train` gradient steps are due at every multiple
    of `train_every`, and then a target update at every multiple of `target_every`.
    """

    state_names: ClassVar[tuple[str, ...]] = (
        "steps",
        "_last_trained_step",
        "_updates_done",
        "_learning_start",
        "target_updates",
    )
    state_limits: ClassVar[Mapping[str, Limits]] = dict.fromkeys(state_names, COUNT)

    def __init__(
        self,
        *,
        learning_starts: int,
        train_every: int,
        updates_per_train: int,
        target_every: int,
        total_steps: int,
    ) -> None:
        self._total_steps, self._steps_before_learning = total_steps, learning_starts
        self._train_every, self._updates_per_train = train_every, updates_per_train
        self._target_every = target_every
        self.steps = 0  # valid environment steps observed
        self._learning_start = learning_starts  # step; later after `restart_learning`
        self._last_trained_step = 0  # all updates due up to this step are done
        self._updates_done = 0  # gradient steps done of those due at the next step
        self.target_updates = 0

    @property
    def has_pending_updates(self) -> bool:
        """Whether an interruption left updates undone."""
        return self._last_trained_step < self.steps

    def due(self, can_sample: Callable[[], bool]) -> Iterator[Due]:
        """Yield what became due since the last call, in order; nothing without samples.

        An update counts as done when the next one is requested: after an interruption, the next
        call yields the interrupted update again.
        """
        for step in range(self._last_trained_step + 1, self.steps + 1):
            trains, updates_target = step % self._train_every == 0, step % self._target_every == 0
            if step > self._learning_start and (trains or updates_target) and can_sample():
                while trains and self._updates_done < self._updates_per_train:
                    yield Due.GRADIENT_STEP
                    self._updates_done += 1
                self._updates_done = 0
                if updates_target:
                    yield Due.TARGET_UPDATE
                    self.target_updates += 1
            else:
                self._updates_done = 0  # what an interruption left has no samples any more
            self._last_trained_step = step

    def first_update(self, steps_without_samples: int = 0) -> int:
        """Return the step of the first gradient steps."""
        every, begin = self._train_every, self._learning_start - self._steps_before_learning
        return max(self._learning_start, begin + steps_without_samples) // every * every + every

    @property
    def first_update_reason(self) -> str:
        """The settings that `first_update` follows from."""
        reason = f"agent.learning_starts={self._steps_before_learning:,}"
        if self._train_every > 1:
            reason += f", train_every={self._train_every:,}"
        restarted = self._learning_start > self._steps_before_learning
        return f"the replay starts empty: {reason}" if restarted else reason

    @property
    def steps_until_update(self) -> int:
        """Environment steps until gradient steps are due, if all earlier ones are done."""
        every = self._train_every
        return max(self.steps, self._learning_start) // every * every + every - self.steps

    def rate(self, schedule: Schedule) -> float:
        """Return the learning rate of an update, which never reaches 0.

        An update at the very last step uses the rate of the interval before it.
        """
        now = min(self.steps, max(0, self._total_steps - self._train_every))
        return schedule.at(now, ahead=self.steps - now)

    def restart_learning(self) -> None:
        """Begin to learn again after `learning_starts` more steps."""
        self._learning_start = self.steps + self._steps_before_learning

    def check_consistency(self, steps: int, most_per_timestep: int) -> None:
        """Raise ValueError if the counts are impossible after `steps` steps of a run."""
        trained, starts = self._last_trained_step, self._steps_before_learning
        if self.steps != steps:
            raise ValueError(f"agent.steps: is {self.steps}, the run's are {steps}")
        if not starts <= self._learning_start <= steps + starts:
            most = f"{starts} to {steps + starts}"
            raise ValueError(f"agent.learning_start: is {self._learning_start}, must be {most}")
        # Updates can be pending for the last timestep, or since the last multiple of train_every.
        left = steps - max(trained, min(steps, self._learning_start))
        if trained > steps or left > self._train_every + 2 * most_per_timestep:
            raise ValueError(
                f"agent.last_trained_step: {trained} is impossible after {steps} steps"
            )
        due = trained < steps and (trained + 1) % self._train_every == 0
        if not 0 <= self._updates_done <= (self._updates_per_train if due else 0):
            raise ValueError(
                f"agent.updates_done: {self._updates_done} are not due at step {trained + 1}"
            )
