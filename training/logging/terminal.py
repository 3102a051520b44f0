"""Log messages and progress lines on the terminal, and safe writing to stdout.

rich (progress bar) takes 2 MB and import time, so it is imported only on a terminal.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from io import TextIOWrapper
from typing import NamedTuple, TextIO

from steadyrl.core.errors import ExpectedError, printable

log = logging.getLogger("steadyrl")

NEVER = logging.CRITICAL + 1

# Error handlers of streams that raise on characters their encoding lacks.
STRICT = ("strict", "surrogateescape", "surrogatepass")


class Stream(NamedTuple):
    """A pipe or a file: plain lines, no progress bar."""

    file: TextIO


class TerminalFormatter(logging.Formatter):
    """The plain message; control characters become spaces."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the message, with the name of its level if that is above INFO."""
        prefix = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        return prefix + printable(record.getMessage())


class TerminalHandler(logging.StreamHandler[TextIO]):
    """Prints messages on a stream that may be closed, or another program's."""

    def __init__(self, stream: TextIO, *, own_process: bool) -> None:
        super().__init__(stream)
        self._own_process = own_process

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        """Drop further output: the reader (a pipe or terminal) is gone."""
        if self._own_process:
            redirect_to_devnull(self.stream)


def accept_all_text(stream: object) -> None:
    """Let a stream write `\\xb1` for a character that its encoding lacks, instead of raising."""
    if isinstance(stream, TextIOWrapper) and stream.errors in STRICT:
        # reconfigure flushes (the disk may be full) and seeks (the stream may be a pipe).
        with suppress(OSError, ValueError):
            stream.reconfigure(errors="backslashreplace")


def redirect_to_devnull(stream: object) -> None:
    """Redirect a stream whose reader is gone to /dev/null, so that exit does not fail either."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())  # type: ignore[attr-defined]
        finally:
            os.close(nowhere)


class OutputError(ExpectedError):
    """The output of a command could not be printed."""

    exit_code = 2


@contextmanager
def safe_stdout() -> Iterator[None]:
    """Guard a command's printing: a full disk is a one-line error, a closed pipe is ignored.

    If stdout is closed, the output is discarded.
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
            except SystemExit as asked:  # raised by argparse after printing the help
                end = asked
            sys.stdout.flush()
        except OSError as error:
            redirect_to_devnull(sys.stdout)
            if not isinstance(error, BrokenPipeError):
                raise OutputError(f"stdout: cannot be written to: {error.strerror}") from None
        if end is not None:
            raise end


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirect what environments and their processes print to stderr: stdout is the report's."""
    if sys.stdout is None:  # stdout is closed
        yield
        return
    stdout_copy = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout_copy, 1)
        os.close(stdout_copy)


class RunLog(logging.Logger):
    """A log that an environment does not switch off.

    `logging.disable` does so to all, `logging.config` to those that a configuration does not name.
    """

    @property
    def disabled(self) -> bool:  # type: ignore[override]
        """Always False, whatever is set."""
        return False

    @disabled.setter
    def disabled(self, value: bool) -> None:
        pass

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 (logging's name)
        """Return whether the log's own level admits the message."""
        return level >= self.getEffectiveLevel()


@contextmanager
def not_switched_off() -> Iterator[None]:
    """Let the `steadyrl` logger be a `RunLog`."""
    before, log.__class__ = log.__class__, RunLog
    try:
        yield
    finally:
        log.__class__ = before


@contextmanager
def attached(handler: logging.Handler) -> Iterator[None]:
    """Attach a handler to the `steadyrl` logger, as its only destination besides earlier ones."""
    before = log.level, log.propagate
    log.setLevel(logging.DEBUG)
    log.propagate = False
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]
        with suppress(OSError):  # a failed write cannot be flushed either
            handler.close()


class Status(NamedTuple):
    """Values of the progress bar or progress line."""

    step: int
    steps_per_second: float
    return_mean: float | None  # None: no episode has ended yet
    memory_mb: float  # of the process tree
    expected: float | None = None  # steps/s for the time left, if not that speed; 0: unknown
    reward_mean: float | None = None  # per step
    cuda_mb: float | None = None  # reserved on the device; None: there is none


def status_texts(status: Status, total: int) -> dict[str, str]:
    """Return the fields of a progress line, in the order they are printed."""
    from steadyrl.memory.process import MB, readable  # here: psutil delays short commands

    expected = status.steps_per_second if status.expected is None else status.expected
    to_do = max(total - status.step, 0)
    left = to_do / expected if expected else 0.0
    name, mean = "return", status.return_mean
    if mean is None and status.reward_mean is not None:
        name, mean = "reward", status.reward_mean
    texts = {
        "steps": f"{status.step:,}".rjust(len(f"{total:,}")),
        "percent": f"{100 * status.step / total:3.0f}%",
        "return": f"{name} {'  -  ' if mean is None else f'{score(mean):>7}'}",
        "speed": f"{status.steps_per_second:>6,.0f} steps/s",
        "memory": f"RAM {readable(status.memory_mb * MB)}",
    }
    if status.cuda_mb is not None:
        texts["cuda"] = f"GPU {readable(status.cuda_mb * MB)}"
    return texts | {"left": f"left {clock_text(left) if expected or not to_do else '-:--'}"}


def clock_text(seconds: float) -> str:
    """Return seconds as 0:07, 12:34 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def score(value: float, separator: str = "") -> str:
    """Return a return with three significant digits or one decimal, in short notation if large.

    `separator`: of thousands, such as ",".
    """
    size = abs(value)
    if not math.isfinite(value) or size >= 1e9 or 0 < size < 1e-4:
        return f"{value:.3g}"
    decimals = 1 if size >= 10 or not size else 2 - math.floor(math.log10(size))
    text = f"{value:{separator}.{decimals}f}".rstrip("0")
    return f"{text}0" if text.endswith(".") else text
