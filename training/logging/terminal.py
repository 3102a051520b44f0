"""What a person sees of a run: messages, and a bar on a terminal or plain lines otherwise.

What draws on a terminal takes 2 MB and its time, so it is imported only where there is one.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from io import TextIOWrapper
from typing import NamedTuple, TextIO

from steadyrl.core.errors import ExpectedError, printable

log = logging.getLogger("steadyrl")

# Lines come at most this often, so that a log of days stays readable.
SECONDS_BETWEEN_LINES = 5.0

NEVER = logging.CRITICAL + 1

# How streams treat what their encoding lacks, where that is an error.
STRICT = ("strict", "surrogateescape", "surrogatepass")


class Stream(NamedTuple):
    """A pipe or a file, where lines stay."""

    file: TextIO


class _ForTerminal(logging.Formatter):
    """The plain message; what would move the cursor or clear the screen becomes a space."""

    def format(self, record: logging.LogRecord) -> str:
        prefix = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        return prefix + printable(record.getMessage())


class _Terminal(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        """Go on in silence: whoever read this (a pipe, a terminal) is gone."""
        redirect_to_devnull(self.stream)


def accept_all_text(stream: object) -> None:
    """Let a stream write `\\xb1` for a character that its encoding lacks, instead of failing."""
    if isinstance(stream, TextIOWrapper) and stream.errors in STRICT:
        # Which flushes, on a disk that may be full, and seeks, in what may be a pipe by now.
        with suppress(OSError, ValueError):
            stream.reconfigure(errors="backslashreplace")


def redirect_to_devnull(stream: object) -> None:
    """Let what is still written to a stream without a reader go nowhere, also at exit."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())  # type: ignore[attr-defined]
        finally:
            os.close(nowhere)


class OutputError(ExpectedError):
    """What was asked for could not be printed."""

    exit_code = 2


@contextmanager
def safe_stdout() -> Iterator[None]:
    """Print what was asked for: refused in a line on a full disk, in silence if nobody reads.

    Where stdout is closed, what is printed goes nowhere.
    """
    with ExitStack() as ended:
        if sys.stdout is None:
            nowhere = ended.enter_context(open(os.devnull, "w"))
            ended.enter_context(redirect_stdout(nowhere))
        accept_all_text(sys.stdout)
        end: SystemExit | None = None
        try:
            try:
                yield
            except SystemExit as asked:  # by a parser that has printed its help
                end = asked
            sys.stdout.flush()
        except OSError as error:
            redirect_to_devnull(sys.stdout)
            if not isinstance(error, BrokenPipeError):
                raise OutputError(f"stdout: cannot be written to: {error.strerror}") from None
        if end is not None:
            raise end


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
    expected: float | None = None  # from here on, if not that speed; 0: nobody knows yet


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
        texts = status_texts(status, self._total)
        log.info("%sstep %s %s", self._label, texts.pop("steps"), "  ".join(texts.values()))

    def close(self) -> None:
        """Nothing to take back: lines stay."""


def status_texts(status: Status, total: int) -> dict[str, str]:
    """Return what is said about a moment, in the order it is read."""
    expected = status.steps_per_second if status.expected is None else status.expected
    to_do = max(total - status.step, 0)
    left = to_do / expected if expected else 0.0
    minutes, seconds = divmod(round(left), 60)
    hours, minutes = divmod(minutes, 60)
    clock = f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
    mean = "  -  " if status.return_mean is None else f"{score(status.return_mean):>7}"
    return {
        "steps": f"{status.step:,}".rjust(len(f"{total:,}")),
        "share": f"{100 * status.step / total:3.0f}%",
        "return": f"return {mean}",
        "speed": f"{status.steps_per_second:>6,.0f} steps/s",
        "memory": f"memory {status.rss_mb:,.0f} MB",
        "left": f"left {clock if expected or not to_do else '-:--'}",
    }


def score(value: float) -> str:
    """Return a return as people read it, however large."""
    return f"{value:.1f}" if abs(value) < 1e9 else f"{value:.3g}"
