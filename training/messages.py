"""Messages to the person and to `train.log`."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Protocol, TextIO, cast

from rich.console import Console
from rich.logging import RichHandler

log = logging.getLogger("steadyrl")


class Closable(Protocol):
    """Something that ends."""

    def close(self) -> None:
        """End it."""


class _ForTerminal(logging.Formatter):
    """The plain message; what would move the cursor or clear the screen becomes a space."""

    def format(self, record: logging.LogRecord) -> str:
        prefix = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        return prefix + "".join(
            c if c.isprintable() or c == "\n" else " " for c in record.getMessage()
        )


class _ForFile(logging.Formatter):
    """The whole story, with control characters written out."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return "".join(
            c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode()
            for c in super().format(record)
        )


class _Terminal(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        """Go on in silence: whoever read this (a pipe, a terminal) is gone."""
        hush(self.stream)


class _LiveTerminal(RichHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        """Go on in silence, as above."""
        hush(self.console.file)


class _LogFile(logging.FileHandler):
    def emit(self, record: logging.LogRecord) -> None:
        """Lose the message where the file cannot be opened: the disk is full, or its handles."""
        with suppress(OSError):
            super().emit(record)

    def _open(self) -> TextIOWrapper:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        handle = os.open(self.baseFilename, flags, 0o644)
        return os.fdopen(handle, "a", encoding="utf-8", errors="backslashreplace")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        """Stay silent: a full disk must not print a traceback for every message."""


def hush(stream: object) -> None:
    """Let what is still written to a stream without a reader go nowhere, also at exit."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())  # type: ignore[attr-defined]
        finally:
            os.close(nowhere)


@contextmanager
def to_terminal(console: Console) -> Iterator[None]:
    """Show messages on the terminal, above the progress bar where there is one."""
    handler: logging.Handler
    if console.is_terminal:
        handler = _LiveTerminal(
            console=console, show_time=False, show_path=False, show_level=False, markup=False
        )
    else:
        handler = _Terminal(cast(TextIO, console.file))
    handler.setFormatter(_ForTerminal())
    handler.setLevel(logging.INFO)
    with _attached(handler):
        yield


@contextmanager
def to_file(path: Path) -> Iterator[None]:
    """Keep messages in a file, with times and the tracebacks the terminal is spared."""
    handler = _LogFile(path, delay=True)
    handler.setFormatter(_ForFile())
    with _attached(handler):
        yield


@contextmanager
def _attached(handler: logging.Handler) -> Iterator[None]:
    log.setLevel(logging.DEBUG)
    log.propagate = False
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        with suppress(OSError):  # what could not be written cannot be flushed either
            handler.close()
