"""What is shown of a run while it lasts: its counts, what it is doing, and the time left."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple, Protocol

from steadyrl.core.clock import Activity, StepRate
from steadyrl.training.logging.terminal import Status, clock_text, status_texts

log = logging.getLogger("steadyrl")

TICK = 0.5  # seconds between two drawings
SECONDS_UNTIL_SHOWN = 0.5  # of a phase: with a tick, within one second

# Limits on log lines, so that the log of a run of days stays readable.
SECONDS_BETWEEN_LINES = 5.0
SECONDS_UNTIL_LINE = 2.0  # of a phase, where lines stay
SECONDS_UNTIL_FIRST_LINE = 10.0  # of steps without a log line

ENVIRONMENTS, FIRST, UPDATES = "waiting for the environments", "the first step", "updating"


class RunningCall(Protocol):
    """Times calls of an environment."""

    @property
    def running(self) -> float:
        """Seconds that the running call has taken so far; 0: none is running."""


class Filling(NamedTuple):
    """What is filled before learning begins: a replay or a rollout."""

    what: str
    until: int  # the step at which learning begins


class Doing(NamedTuple):
    """What takes long, for how many seconds, and how far it has come."""

    what: str
    seconds: float
    progress: str = ""


class Display:
    """Shows nothing; the base of those that do.

    The run only stores numbers here. A thread draws them: it reads nothing else of the run, ends
    with `close`, and gives up where it cannot write.
    """

    def __init__(self, total: int, label: str, activity: Activity | None = None) -> None:
        self.activity = activity or Activity()
        self._total, self._label = total, label
        self._status: Status | None = None  # no metrics yet
        self._begin = 0
        self._step: int | None = None  # None: not begun
        self._updates = self._updates_before = 0
        self._filling: Filling | None = None
        self._others_mb = 0.0  # memory of the process tree beyond this process's RSS
        self._cuda_mb: float | None = None
        self._rate = StepRate()
        self._env: RunningCall | None = None
        self._seen: int | None = None  # the step at the last tick
        self._seen_first = 0.0  # when
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(
        self, step: int, env: RunningCall, updates: int = 0, filling: Filling | None = None
    ) -> None:
        """Begin to take steps, after `step` and so many updates; `env` times the environments."""
        self._begin = self._step = step
        self._updates = self._updates_before = updates
        self._env, self._filling = env, filling

    def on_steps(self, step: int, updates: int) -> None:
        """Note how many steps and updates are done."""
        self._step, self._updates = step, updates
        if not self._rate.has_updated:
            self._rate.on_timestep(self._working, step, updates)

    def report(self, step: int, scalars: Mapping[str, float]) -> None:
        """Show the metrics of a log line, by their tags."""
        speed = scalars.get("time/steps_per_second")
        if speed is None:  # a line of an evaluation alone
            return
        rss = scalars.get("memory/rss_mb", 0.0)
        if "memory/tree_pss_mb" in scalars:  # which is read less often
            self._others_mb = scalars["memory/tree_pss_mb"] - rss
        self._cuda_mb = scalars.get("memory/cuda_reserved_mb", self._cuda_mb)
        return_mean = scalars.get("rollout/return_mean")
        reward = scalars.get("rollout/reward_mean")
        memory = max(0.0, rss + self._others_mb)
        self.show(Status(step, speed, return_mean, memory, None, reward, self._cuda_mb))

    def show(self, status: Status) -> None:
        """Show new metrics; the time left follows from the steps since the last ones."""
        expected = self._rate.take(self._working, status.step, self._updates)
        self._status = status._replace(expected=expected)

    @property
    def texts(self) -> dict[str, str]:
        """The fields to show: the newest metrics, at the newest step."""
        step = self._step or 0
        if self._status is None:
            texts = status_texts(Status(step, 0.0, None, 0.0, 0.0), self._total)
            return {name: texts[name] for name in ("steps", "percent", "left")}
        return status_texts(self._status._replace(step=step), self._total)

    @property
    def filling(self) -> Filling | None:
        """What the steps fill before learning begins; None: learning has begun."""
        filling = self._filling
        if filling is None or self._updates > self._updates_before:
            return None
        return filling if (self._step or 0) < filling.until else None

    @property
    def _working(self) -> float:
        """Seconds on the clock without those of phases: compiling, evaluating, saving."""
        return self.activity.clock() - self.activity.seconds

    def doing(self, least: float = SECONDS_UNTIL_SHOWN) -> Doing | None:
        """Return what has taken `least` seconds or more; None: steps are taken."""
        now = self.activity.clock()
        if phases := self.activity.phases:
            found = Doing(phases[-1].what, now - phases[-1].begun, phases[-1].progress)
        elif self._env is not None and (seconds := self._env.running) >= least:
            found = Doing(ENVIRONMENTS, seconds)
        elif self._step is not None and self._step == self._seen:
            what = FIRST if self._step == self._begin else UPDATES
            found = Doing(what, now - self._seen_first)
        else:
            return None
        return found if found.seconds >= least else None

    def tick(self) -> None:
        """Draw; called by the thread."""
        if self._step != self._seen or self.activity.phases:
            self._seen, self._seen_first = self._step, self.activity.clock()
        self.draw()

    def draw(self) -> None:
        """Show the current state."""

    def start(self) -> None:
        """Start the thread; where the system has none left, only metrics are shown."""
        self._thread = threading.Thread(target=self._draw, name="display", daemon=True)
        with suppress(RuntimeError):
            self._thread.start()

    def _draw(self) -> None:
        while not self._ended.wait(TICK):
            try:
                self.tick()
            except Exception:  # of any terminal or stream: a display never ends a run
                log.debug("the display stops", exc_info=True)
                self.give_up()
                return

    def give_up(self) -> None:
        """Write nothing any more."""

    def close(self) -> None:
        """End the thread, unless it hangs in writing, and remove what does not stay."""
        self._ended.set()
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join(2 * TICK)
        self._env = None  # leads to the environments


class Lines(Display):
    """Plain lines, for log files and pipes."""

    def __init__(self, total: int, label: str = "", activity: Activity | None = None) -> None:
        super().__init__(total, f"{label} " if label else "", activity)
        self._next = self._announced = float("-inf")
        self._known: set[str] = set()  # announced once in a run
        self._begun: float | None = None  # the first step; None: not yet, or there was a line

    def begin(
        self, step: int, env: RunningCall, updates: int = 0, filling: Filling | None = None
    ) -> None:
        """Begin to take steps."""
        super().begin(step, env, updates, filling)
        self._begun = self.activity.clock()

    def show(self, status: Status) -> None:
        """Print a line if the last one is `SECONDS_BETWEEN_LINES` old."""
        super().show(status)
        self._begun = None
        now = self.activity.clock()
        if now < self._next and status.step < self._total:
            return
        self._next = now + SECONDS_BETWEEN_LINES
        texts = self.texts
        if (filling := self.filling) is not None:  # how long learning takes is not known yet
            texts["left"] = f"learns at {filling.until:,}"
        log.info("%sstep %s %s", self._label, texts.pop("steps"), "  ".join(texts.values()))

    def draw(self) -> None:
        """Print a line for a phase that lasts, once; and for steps without a log line."""
        found = self.doing(SECONDS_UNTIL_LINE)
        if found is not None and self._is_new(found.what):
            log.info("%s%s ...", self._label, found.what)
        now = self.activity.clock()
        if self._begun is not None and now - self._begun >= SECONDS_UNTIL_FIRST_LINE:
            log.info(
                "%sstep %s of %s after %s (metrics come every log.every steps)",
                self._label,
                f"{self._step or 0:,}",
                f"{self._total:,}",
                clock_text(now - self._begun),
            )
            self._begun = None

    def _is_new(self, what: str) -> bool:
        """Return whether what lasts has no line yet; it has one from now on."""
        if not (phases := self.activity.phases):
            new = what not in self._known
            self._known.add(what)
            return new
        newest = phases[-1]
        new = newest.begun > self._announced and not newest.logged
        self._announced = max(self._announced, newest.begun)
        return new
