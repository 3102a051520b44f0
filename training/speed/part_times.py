"""Seconds that a run spends acting, in its environments and updating."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import ClassVar, NamedTuple

from steadyrl.agents.base import Agent
from steadyrl.core.metrics import Metrics
from steadyrl.core.saved_state import COUNT, Limits
from steadyrl.core.state import Stateful


class Logged(NamedTuple):
    """Steps and seconds at the last log line."""

    steps: int
    act: float
    environment: float
    update: float


class PartTimes(Stateful):
    """Seconds so far by part; the collector adds to them at every timestep.

    A wait for environments that overlaps an update counts once, as update.
    """

    state_names = ("act", "environment", "update", "_logged")
    state_limits: ClassVar[Mapping[str, Limits]] = dict.fromkeys(state_names, COUNT)

    def __init__(self) -> None:
        self.act = self.environment = self.update = 0.0
        self._logged = Logged(0, 0.0, 0.0, 0.0)

    def timed_update(self, agent: Agent) -> Metrics | None:
        """Call the agent's `update`."""
        begin = perf_counter()
        metrics = agent.update()
        self.update += perf_counter() - begin
        return metrics

    def milliseconds(self, steps: int, speed: float) -> dict[str, float]:
        """Return milliseconds per step since the last call, by tag; `speed` is in steps/s."""
        last, self._logged = self._logged, Logged(steps, self.act, self.environment, self.update)
        taken = steps - last.steps
        if taken <= 0 or speed <= 0:  # a checkpoint may say anything
            return {}
        parts = {
            f"time/{name}_ms": 1e3 * (getattr(self, name) - getattr(last, name)) / taken
            for name in ("environment", "act", "update")
        }
        return parts | {"time/other_ms": max(0.0, 1e3 / speed - sum(parts.values()))}

    def shares(self, seconds: float, training: float) -> dict[str, float]:
        """Return fractions of a run's `seconds`; those without `training` are evaluation."""
        whole = max(seconds, 1e-9)
        own = {name: getattr(self, name) / whole for name in ("environment", "act", "update")}
        evaluation = (seconds - training) / whole
        other = max(0.0, 1.0 - evaluation - sum(own.values()))
        return own | {"evaluation": evaluation, "other": other}
