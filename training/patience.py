"""How long a row may still take once a signal asks the run to end: longer where rows are slow."""

from __future__ import annotations

from collections.abc import Sequence

from envs.vector import VectorEnv
from training.settings import RunSettings
from training.signals import ROW_SECONDS

TIMES = 2.0  # of the slowest row so far, because rows differ


class Patience:
    """Goes by the slowest row so far, or by what one under way has taken, and the step timeout."""

    def __init__(self, settings: RunSettings, envs: Sequence[VectorEnv]) -> None:
        chosen = settings.stop_timeout
        self._chosen = None if chosen == "auto" else chosen
        self._step_timeout, self._envs = settings.env.step_timeout, envs

    def seconds(self) -> float:
        """Return how long the run should wait for the row under way."""
        if self._chosen is not None:
            return self._chosen
        return max(ROW_SECONDS, *(self._of(env) for env in self._envs))

    def _of(self, env: VectorEnv) -> float:
        expected = min(TIMES * env.clock.slowest, self._step_timeout * env.spec.num_envs)
        running = env.clock.running
        # A first step of a minute may have half a minute left; one that takes an hour hangs.
        return max(expected, running if running < self._step_timeout else 0.0)
