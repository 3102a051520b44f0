"""What happens when an environment breaks: it is named, counted, and rebuilt or given up."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from envs.types import EnvironmentFailedError
from memory.errors import ExpectedError, NonFiniteError

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


def fault(env: int, step: int, error: BaseException) -> ExpectedError:
    """Name the environment, the step and what went wrong there."""
    if isinstance(error, NonFiniteError):
        return error
    what = " ".join(str(error).split()) or "no message"
    return EnvironmentFailedError(
        f"environment {env} failed at step {step}: {type(error).__name__}: {what}"
    )


def not_finite(name: str, env: int, step: int) -> NonFiniteError:
    """Name the tensor that is not finite."""
    return NonFiniteError(f"{name} of environment {env} is not finite at step {step}")
