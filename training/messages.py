"""Messages to the person and to `train.log`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.logging import RichHandler

log = logging.getLogger("steadyrl")


class Closable(Protocol):
    """Something that ends."""

    def close(self) -> None:
        """End it."""


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        prefix = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        return prefix + record.getMessage()


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        """Stay silent: a full disk must not print a traceback for every message."""


@contextmanager
def to_terminal(console: Console) -> Iterator[None]:
    """Show messages on the terminal, above the progress bar where there is one."""
    handler: logging.Handler
    if console.is_terminal:
        handler = RichHandler(
            console=console, show_time=False, show_path=False, show_level=False, markup=False
        )
    else:
        handler = logging.StreamHandler(console.file)
    handler.setFormatter(_Plain())
    handler.setLevel(logging.INFO)
    with _attached(handler):
        yield


@contextmanager
def to_file(path: Path) -> Iterator[None]:
    """Keep messages in a file, with times and the tracebacks the terminal is spared."""
    handler = _LogFile(path, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
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
        handler.close()
