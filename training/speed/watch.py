"""Measures where a run's time goes, and watches its speed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from steadyrl.core.clock import Stopwatch, seconds_in_phases
from steadyrl.memory.process import usable_cores
from steadyrl.memory.settings import SlowdownSettings
from steadyrl.training.checkpoints.summary import Summary
from steadyrl.training.speed.part_times import PartTimes
from steadyrl.training.speed.processor import ProcessorTimes, read_processor
from steadyrl.training.speed.sample import Sample
from steadyrl.training.speed.slowdown import SlowdownDetector, Trend

log = logging.getLogger("steadyrl")

SECONDS_BETWEEN = 1.0  # two samples, at least

# From when on, and from which fraction of the time, evaluations are said to take long.
SHARE_AFTER_SECONDS = 300.0
LARGE_SHARE = 0.5


class Timed(Protocol):
    """Counts its own seconds."""

    seconds: float


class Counts(NamedTuple):
    """What a run has done and spent when a sample was taken."""

    steps: int
    updates: int
    training: float  # seconds without pauses
    paused: float
    phases: float  # seconds of compiling, evaluating, saving
    act: float
    environment: float
    update: float
    callbacks: float
    processor: ProcessorTimes


class SpeedWatch:
    """Takes a sample after each log line, and warns of slow-downs.

    It is taken right after the next update, so that PPO's rollouts and updates are whole in it.
    """

    def __init__(
        self, settings: SlowdownSettings, times: PartTimes, callbacks: Timed, *, warns: bool
    ) -> None:
        """Start; of several ranks, one warns."""
        self._times, self._callbacks, self._warns = times, callbacks, warns
        self._detector = SlowdownDetector(settings, usable_cores())
        self._last: Counts | None = None
        self._learns, self._due = False, True  # a sample is due after the next update
        self._warned_of_pauses = False
        self._scalars: Mapping[str, float] = {}  # of the last log line
        self._trend: tuple[Counts | None, Trend | None] = None, None  # when it was computed

    def on_log(
        self, steps: int, speed: float, stopwatch: Stopwatch, scalars: Mapping[str, float]
    ) -> dict[str, float]:
        """Return the times of parts for a log line; until the first update it is a sample."""
        self._scalars, last = scalars, self._last
        if last is None or stopwatch.training - last.training >= SECONDS_BETWEEN:
            self._due = True
            if not self._learns:
                self._take(steps, 0, stopwatch)
        self._warn_of_pauses(stopwatch)
        return self._times.milliseconds(steps, speed)

    def _warn_of_pauses(self, stopwatch: Stopwatch) -> None:
        """Warn once where most of the time goes into evaluations."""
        seconds, paused = stopwatch.seconds, stopwatch.seconds - stopwatch.training
        long = seconds >= SHARE_AFTER_SECONDS and paused > LARGE_SHARE * seconds
        if not long or self._warned_of_pauses or not self._warns:
            return
        self._warned_of_pauses = True
        log.warning(
            "evaluations, videos and reports take %.0f%% of the time so far: a larger eval.every,"
            " or fewer eval.episodes, leave more for training",
            100 * paused / seconds,
        )

    def on_update(self, steps: int, updates: int, stopwatch: Stopwatch) -> None:
        """Take a sample if one is due; begin anew with the first update, as steps do more now."""
        if not self._due:
            return
        if not self._learns:
            self._learns, self._last = True, None
            self._detector.restart_warmup()
        self._due = False
        self._take(steps, updates, stopwatch)

    def fill(self, summary: Summary, stopwatch: Stopwatch) -> None:
        """Set the summary's fractions of time and trend of the speed."""
        fractions = self._times.fractions(stopwatch.seconds, stopwatch.training)
        for name, fraction in fractions.items():
            setattr(summary, f"time_share_{name}", fraction)
        if self._trend[0] is not self._last:
            self._trend = self._last, self._detector.trend
        if (trend := self._trend[1]) is not None:
            summary.speed_trend_percent = trend.percent
            summary.speed_trend_percent_low = trend.low
            summary.speed_trend_percent_high = trend.high

    def _take(self, steps: int, updates: int, stopwatch: Stopwatch) -> None:
        times, last, training = self._times, self._last, stopwatch.training
        if last is not None and steps == last.steps:
            return
        self._last = Counts(
            steps,
            updates,
            training,
            stopwatch.seconds - training,
            seconds_in_phases(),
            times.act,
            times.environment,
            times.update,
            self._callbacks.seconds,
            read_processor(),
        )
        if last is None:
            return
        warning = self._detector.add(_sample(last, self._last, self._scalars))
        if warning is not None and self._warns:
            log.warning(warning)


def _sample(last: Counts, now: Counts, scalars: Mapping[str, float]) -> Sample:
    """Return the means between two counts."""
    steps = now.steps - last.steps

    def since(name: str) -> float:
        seconds: float = getattr(now, name) - getattr(last, name)
        return 1e3 * seconds / steps

    def got(name: str) -> float | None:
        after, before = getattr(now.processor, name), getattr(last.processor, name)
        return None if after is None or before is None else 1e3 * (after - before) / steps

    # Phases that are no pause, such as compiling, are left out.
    total = max(since("training") - max(0.0, since("phases") - since("paused")), 1e-9)
    parts = {name: since(name) for name in ("environment", "act", "update", "callbacks")}
    return Sample(
        step=now.steps,
        total=total,
        **parts,
        other=max(0.0, total - sum(parts.values())),
        updates=(now.updates - last.updates) / steps,
        cpu=got("cpu") or 0.0,
        waited=got("waited"),
        throttled=got("throttled"),
        mhz=now.processor.mhz,
        rss_mb=scalars.get("memory/rss_mb"),
        length=scalars.get("rollout/length_mean"),
    )
