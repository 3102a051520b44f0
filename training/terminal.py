"""What a person sees of a run: messages, and a bar on a terminal or plain lines otherwise."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.logging import RichHandler
from rich.text import Text

log = logging.getLogger("steadyrl")

# Lines come at most this often, so that a log of days stays readable.
SECONDS_BETWEEN_LINES = 5.0

NEVER = logging.CRITICAL + 1

# What is left out of the bar's line first stands last.
BY_IMPORTANCE = ("run", "steps", "share", "left", "return", "speed", "memory")
GAP = 2  # spaces after each
SHORTEST_BAR, LONGEST_BAR = 8, 30


class _ForTerminal(logging.Formatter):
    """The plain message; what would move the cursor or clear the screen becomes a space."""

    def format(self, record: logging.LogRecord) -> str:
        prefix = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        return prefix + "".join(
            c if c.isprintable() or c == "\n" else " " for c in record.getMessage()
        )


class _Terminal(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        """Go on in silence: whoever read this (a pipe, a terminal) is gone."""
        hush(self.stream)


class _LiveTerminal(RichHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        """Go on in silence, as above."""
        hush(self.console.file)


def hush(stream: object) -> None:
    """Let what is still written to a stream without a reader go nowhere, also at exit."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())  # type: ignore[attr-defined]
        finally:
            os.close(nowhere)


@contextmanager
def to_terminal(console: Console, *, silent: bool = False) -> Iterator[None]:
    """Show messages on the terminal, above the progress bar where there is one."""
    handler: logging.Handler
    if console.is_terminal:
        handler = _LiveTerminal(
            console=console, show_time=False, show_path=False, show_level=False, markup=False
        )
    else:
        handler = _Terminal(cast(TextIO, console.file))
    handler.setFormatter(_ForTerminal())
    handler.setLevel(NEVER if silent else logging.INFO)
    with attached(handler):
        yield


@contextmanager
def attached(handler: logging.Handler) -> Iterator[None]:
    """Send messages to a handler, and only to those chosen here."""
    log.setLevel(logging.DEBUG)
    log.propagate = False
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        with suppress(OSError):  # what could not be written cannot be flushed either
            handler.close()


class Status(NamedTuple):
    """What is worth a look while a run goes on."""

    step: int
    steps_per_second: float
    return_mean: float | None
    rss_mb: float


class Bar:
    """A live line: steps, a bar, speed, return, memory and the time left, as far as they fit."""

    def __init__(self, console: Console, total: int, label: str = "") -> None:
        self._total, self._label = total, label
        self._status = Status(0, 0.0, None, 0.0)
        self._live = Live(self, console=console, refresh_per_second=4, transient=True)
        with suppress(OSError):  # a terminal that is gone ends no run
            self._live.start()

    def show(self, status: Status) -> None:
        """Move the bar."""
        self._status = status

    def close(self) -> None:
        """Take the bar off the screen."""
        with suppress(OSError):
            self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        texts = {"run": self._label} if self._label else {}
        texts |= _texts(self._status, self._total)
        room = options.max_width - 1
        shown = set()
        for name in BY_IMPORTANCE:
            if name in texts and len(texts[name]) + GAP <= room:
                shown.add(name)
                room -= len(texts[name]) + GAP
        line = Text(no_wrap=True, overflow="crop")
        done, to_do = ("-", " ") if options.ascii_only else ("━", "━")
        for name in texts:
            if name in shown:
                line.append(texts[name] + " " * GAP)
            if name == "steps" and room - GAP >= SHORTEST_BAR:
                width = min(room - GAP, LONGEST_BAR)
                full = min(width, width * self._status.step // self._total)
                line.append(done * full, "bar.complete")
                line.append(to_do * (width - full) + " " * GAP, "bar.back")
        yield line


class Lines:
    """One plain line now and then, for logs and pipes."""

    def __init__(self, total: int, label: str = "") -> None:
        self._total, self._label = total, f"{label} " if label else ""
        self._next = 0.0

    def show(self, status: Status) -> None:
        """Print a line when the last one is some seconds old."""
        now = time.monotonic()
        if now < self._next and status.step < self._total:
            return
        self._next = now + SECONDS_BETWEEN_LINES
        texts = _texts(status, self._total)
        log.info("%sstep %s %s", self._label, texts.pop("steps"), "  ".join(texts.values()))

    def close(self) -> None:
        """Nothing to take back: lines stay."""


def _texts(status: Status, total: int) -> dict[str, str]:
    """Return what is said about a moment, in the order it is read."""
    left = (total - status.step) / max(status.steps_per_second, 1e-9)
    minutes, seconds = divmod(max(round(left), 0), 60)
    hours, minutes = divmod(minutes, 60)
    clock = f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
    mean = "  -  " if status.return_mean is None else f"{score(status.return_mean):>7}"
    return {
        "steps": f"{status.step:,}".rjust(len(f"{total:,}")),
        "share": f"{100 * status.step / total:3.0f}%",
        "return": f"return {mean}",
        "speed": f"{status.steps_per_second:>6,.0f} steps/s",
        "memory": f"memory {status.rss_mb:,.0f} MB",
        "left": f"left {clock if status.steps_per_second else '-:--'}",
    }


def score(value: float) -> str:
    """Return a return as people read it, however large."""
    return f"{value:.1f}" if abs(value) < 1e9 else f"{value:.3g}"


def open_progress(
    console: Console, total: int, label: str = "", *, silent: bool = False
) -> Bar | Lines:
    """Return the progress that suits where the output goes, of a run that may have a label."""
    live = console.is_terminal and not silent
    return Bar(console, total, label) if live else Lines(total, label)
