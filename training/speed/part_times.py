"""Seconds that a run spends acting, in its environments and updating."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import fmean
from time import perf_counter
from typing import Any, ClassVar, NamedTuple

from typing_extensions import override

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

    def __init__(self, step_times: int = 100, collect_times: int = 20) -> None:
        """Start; of so many updates, and times of collecting between them, means are reported."""
        self.act = self.environment = self.update = 0.0
        self._logged = Logged(0, 0.0, 0.0, 0.0)
        self.slowest = 0.0  # seconds of a gradient step, but for the first update, which compiles
        self._counted: int | None = None  # gradient steps after the last update
        self._begun: float | None = None  # when the running update began
        self._updates: deque[float] = deque(maxlen=step_times)
        self._collecting: deque[float] = deque(maxlen=collect_times)
        self._collected = 0.0  # seconds of collecting until the last update

    @property
    def running(self) -> float:
        """Seconds that the running update has taken so far; 0: none is running."""
        return 0.0 if self._begun is None else perf_counter() - self._begun

    def timed_update(self, agent: Agent) -> Metrics | None:
        """Call the agent's `update`."""
        self._begun = begin = perf_counter()
        try:
            metrics = agent.update()
        finally:
            self._begun = None
        taken = perf_counter() - begin
        self.update += taken
        if metrics is not None:
            before, self._counted = self._counted, agent.updates
            if before is not None:
                self.slowest = max(self.slowest, taken / max(1, self._counted - before))
            collected = self.act + self.environment
            self._updates.append(taken)
            self._collecting.append(collected - self._collected)
            self._collected = collected
        return metrics

    def means(self) -> dict[str, float]:
        """Return mean milliseconds of the newest updates, and of collecting between two."""
        if not self._updates:
            return {}
        return {
            "time/step_ms": 1e3 * fmean(self._updates),
            "time/collect_ms": 1e3 * fmean(self._collecting),
        }

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._collected = self.act + self.environment

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

    def fractions(self, seconds: float, training: float) -> dict[str, float]:
        """Return fractions of a run's `seconds`; those without `training` are evaluation."""
        whole = max(seconds, 1e-9)
        own = {name: getattr(self, name) / whole for name in ("environment", "act", "update")}
        evaluation = max(0.0, seconds - training) / whole
        other = max(0.0, 1.0 - evaluation - sum(own.values()))
        return own | {"evaluation": evaluation, "other": other}
