"""What happens when an environment breaks: it is named, counted, and rebuilt or given up."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NoReturn

from steadyrl.core.errors import ExpectedError, NonFiniteError, SettingError, one_line, with_place
from steadyrl.envs.types import EnvironmentFailedError

log = logging.getLogger("steadyrl")
HOUR = 3600.0


class RestartBudget:
    """How many environments may still be rebuilt within an hour."""

    def __init__(self, per_hour: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._spent: deque[float] = deque(maxlen=per_hour)
        self._per_hour = per_hour
        self._clock = clock

    def spend(self) -> bool:
        """Use one restart up; false when none is left."""
        now = self._clock()
        while self._spent and now - self._spent[0] >= HOUR:
            self._spent.popleft()
        if len(self._spent) >= self._per_hour:
            return False
        self._spent.append(now)
        return True


class Faults:
    """The step that the environments are at, and what becomes of one that breaks there."""

    def __init__(self, max_restarts: int, role: str = "") -> None:
        self.step = 0  # rows since the start of the run
        self._budget = RestartBudget(max_restarts)
        self._role = role  # such as "evaluation's "

    def handle_failure(self, env: int, error: BaseException) -> None:
        """Use one restart up for this failure, or raise it when none is left.

        Ctrl-C is nobody's failure, and a wrong setting stays wrong: both pass as they are.
        """
        if isinstance(error, KeyboardInterrupt | SettingError):
            raise error
        failure: ExpectedError = EnvironmentFailedError(
            f"{self._role}environment {env} failed at step {self.step}: {error_summary(error)}"
        )
        if isinstance(error, NonFiniteError):
            failure = error
        fatal = isinstance(error, EnvironmentFailedError) or (
            isinstance(error, WorkerError) and error.fatal
        )
        if fatal or not self._budget.spend():
            raise failure from error
        log.error("%s; it is built anew", failure, exc_info=error)

    def non_finite_error(self, name: str, env: int, number: str) -> NonFiniteError:
        """Name the array that is not finite, and the number that is none."""
        where = f"{name} of {self._role}environment {env}"
        return NonFiniteError(f"{where} is not finite at step {self.step}: {number}")

    def give_up(self, name: str, error: BaseException) -> NoReturn:
        """Raise what broke in a simulator of all environments, which cannot be built anew."""
        if isinstance(error, KeyboardInterrupt | ExpectedError):
            raise error
        what = f"{self._role}{name} failed at step {self.step}: {error_summary(error)}"
        raise EnvironmentFailedError(what) from error


class WorkerError(Exception):
    """What went wrong in the process of an environment, and its traceback as text."""

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
        self.user_frames = tuple(user_frames)  # the last ones, as they are shown
        self.fatal = fatal  # building it anew would not help
        self.raised = raised  # an ordinary exception; the process itself was sound
        if trace:
            self.__cause__ = RemoteTraceback(trace)


class RemoteTraceback(Exception):  # noqa: N818 - it is shown, never raised
    """The traceback of another process, shown above the error it caused."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


def error_summary(error: BaseException) -> str:
    """Return what is said of an error in one line; of foreign errors type and place too."""
    if isinstance(error, WorkerError | EnvironmentFailedError):
        return one_line(str(error))
    return with_place(error)


def validate_same_spaces(before: str, now: str) -> None:
    """Refuse an environment that is not like the others or like itself before."""
    if now != before:
        raise EnvironmentFailedError(f"its spaces are {now}, but they were {before}")
