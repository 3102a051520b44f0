"""A bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

log = logging.getLogger("steadyrl")

# Lines come at most this often, so that a log of days stays readable.
SECONDS_BETWEEN_LINES = 5.0


class Status(NamedTuple):
    """What is worth a look while a run goes on."""

    step: int
    steps_per_second: float
    return_mean: float | None
    rss_mb: float


class Bar:
    """A live bar with speed, return, memory and the time left."""

    def __init__(self, console: Console, total: int) -> None:
        self._progress = Progress(
            TextColumn("{task.fields[steps]}"),
            BarColumn(bar_width=30),
            TextColumn("{task.percentage:>3.0f}%  {task.fields[text]}  left"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
        )
        self._total = total
        self._task = self._progress.add_task("", total=total, text="", steps="")
        self._progress.start()

    def show(self, status: Status) -> None:
        """Move the bar."""
        self._progress.update(
            self._task,
            completed=min(status.step, self._total),
            steps=f"{status.step:,}",
            text=_numbers(status),
        )

    def close(self) -> None:
        """Take the bar off the screen."""
        self._progress.stop()


class Lines:
    """One plain line now and then, for logs and pipes."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._next = 0.0

    def show(self, status: Status) -> None:
        """Print a line when the last one is some seconds old."""
        now = time.monotonic()
        if now < self._next and status.step < self._total:
            return
        self._next = now + SECONDS_BETWEEN_LINES
        left = (self._total - status.step) / max(status.steps_per_second, 1e-9)
        minutes, seconds = divmod(max(round(left), 0), 60)
        share = f"{100 * status.step / self._total:3.0f}%"
        line = f"step {status.step:>9,} {share}  {_numbers(status)}  left {minutes}:{seconds:02d}"
        log.info(line)

    def close(self) -> None:
        """Nothing to take back: lines stay."""


def _numbers(status: Status) -> str:
    mean = "  -  " if status.return_mean is None else f"{status.return_mean:7.1f}"
    return (
        f"return {mean}  {status.steps_per_second:>6,.0f} steps/s  memory {status.rss_mb:,.0f} MB"
    )


def open_progress(console: Console, total: int) -> Bar | Lines:
    """Return the progress that suits where the output goes."""
    return Bar(console, total) if console.is_terminal else Lines(total)
