"""Failures of environments: rebuild the environment within a budget, or end the run."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NoReturn

from steadyrl.core.errors import (
    ExpectedError,
    MemoryBudgetError,
    NonFiniteError,
    SettingError,
    one_line,
    with_place,
)
from steadyrl.envs.types import EnvironmentFailedError

log = logging.getLogger("steadyrl")
HOUR = 3600.0
FILM = "video"  # what errors about a film's file name: they are none of the environment


class RestartBudget:
    """Limits rebuilt environments to `env.max_restarts` per hour."""

    def __init__(self, per_hour: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._spent: deque[float] = deque(maxlen=per_hour)
        self._per_hour = per_hour
        self._clock = clock

    def spend(self) -> bool:
        """Take one restart from the budget; return False if none is left."""
        now = self._clock()
        while self._spent and now - self._spent[0] >= HOUR:
            self._spent.popleft()
        if len(self._spent) >= self._per_hour:
            return False
        self._spent.append(now)
        return True


class Faults:
    """Handles failures of environments; knows the current step for error messages.

    It is in environment steps, as everywhere else, once a run counts them; else in timesteps.
    """

    def __init__(self, max_restarts: int, role: str = "") -> None:
        self.step = 0  # timesteps since the start of the run
        self.counted: Callable[[], int] | None = None  # environment steps of the run
        self.ahead = 0  # valid steps of the running block, which `counted()` does not include yet
        self.memory_error: MemoryBudgetError | None = None  # ends the run once it is saved
        self._max_restarts, self._budget = max_restarts, RestartBudget(max_restarts)
        self._role = role  # such as "evaluation's "

    @property
    def _when(self) -> str:
        if self.counted is None:
            return f"at step {self.step:,}"
        return f"at step {self.counted() + self.ahead:,} of the run"

    @property
    def _under_way(self) -> bool:
        return bool(self.step or (self.counted is not None and self.counted()))

    def handle_failure(self, env: int, error: BaseException) -> None:
        """Log a failure and take one restart from the budget; raise if none is left.

        KeyboardInterrupt is re-raised unchanged, as is a SettingError before the first step: later
        the settings have worked, but for the film's file, whose disk may fill up. After a kill for
        lack of memory the environment is rebuilt once, so that the run can be saved before it ends.
        """
        wrong_setting = isinstance(error, SettingError) and (
            error.field == FILM or not self._under_way
        )
        if isinstance(error, KeyboardInterrupt) or wrong_setting:
            raise error
        what = f"{self._role}environment {env} failed {self._when}: {error_summary(error)}"
        if isinstance(error, MemoryBudgetError):
            self._end_for_memory(MemoryBudgetError(what))
            return
        failure: ExpectedError = EnvironmentFailedError(what)
        if isinstance(error, NonFiniteError):
            failure = error
        fatal = isinstance(error, EnvironmentFailedError) or (
            isinstance(error, WorkerError) and error.fatal
        )
        if fatal:
            raise failure from error
        if not self._budget.spend():
            if self._max_restarts:  # else none is ever rebuilt
                spent = f"env.max_restarts={self._max_restarts} within an hour is used up"
                failure.append(f"; not rebuilt: {spent}")
            raise failure from error
        log.error("%s; rebuilding it", failure, exc_info=error)

    def _end_for_memory(self, error: MemoryBudgetError) -> None:
        """Keep the first such error, which ends a run under way; raise any other."""
        if not self._under_way or self.memory_error is not None:
            raise error
        self.memory_error = error
        log.error("%s; rebuilding it to save the run, which then ends", error)

    def non_finite_error(self, name: str, env: int, number: str) -> NonFiniteError:
        """Return the error for a NaN or infinity in an array of an environment."""
        where = f"{name} of {self._role}environment {env}"
        return NonFiniteError(f"{where} is not finite {self._when}: {number}")

    def give_up(self, name: str, error: BaseException) -> NoReturn:
        """Raise the failure of a simulator that runs all environments: it cannot be rebuilt."""
        expected = isinstance(error, KeyboardInterrupt | ExpectedError)
        if expected and not isinstance(error, EnvironmentFailedError):
            raise error
        what = f"{self._role}{name} failed {self._when}: {error_summary(error)}"
        raise EnvironmentFailedError(what) from error


class WorkerError(Exception):
    """A failure in an environment's worker process, with its traceback as text."""

    def __init__(
        self,
        what: str,
        trace: str = "",
        *,
        fatal: bool = False,
        raised: bool = False,
        user_frames: Sequence[str] = (),
    ) -> None:
        super().__init__(what)
        self.user_frames = tuple(user_frames)  # formatted frames of user code, innermost last
        self.fatal = fatal  # rebuilding would not help
        self.raised = raised  # an ordinary exception; the process itself is intact
        if trace:
            self.__cause__ = RemoteTraceback(trace)


class RemoteTraceback(Exception):  # noqa: N818 - it is shown, never raised
    """The traceback of another process, shown above the error it caused."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


def error_summary(error: BaseException) -> str:
    """Return an error as one line; errors of user code with type and location."""
    if isinstance(error, WorkerError | ExpectedError):
        return one_line(str(error))
    return with_place(error)


def validate_same_spaces(before: str, now: str) -> None:
    """Raise EnvironmentFailedError unless a built environment has the spaces of the others."""
    if now != before:
        raise EnvironmentFailedError(f"its spaces are {now}, but they were {before}")
