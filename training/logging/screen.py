"""Choose how progress is shown: a bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO, cast

from steadyrl.training.logging.terminal import (
    NEVER,
    Lines,
    Stream,
    _TerminalFormatter,
    _TerminalHandler,
    accept_all_text,
    attached,
)

if TYPE_CHECKING:
    from rich.console import Console

    from steadyrl.training.logging.progress_bar import Bar


# Environment variables that ask for terminal output where stdout is no terminal.
ASKED_FOR = {"FORCE_COLOR", "TTY_COMPATIBLE"}


def find_screen() -> Console | Stream:
    """Return the rich console of a terminal, or the plain output stream."""
    # sys.stdout is None if Python was started with it closed; messages go to stderr then.
    watched = sys.stdout is not None and sys.stdout.isatty()
    if not watched and not ASKED_FOR & os.environ.keys():
        return Stream(sys.stdout)
    from rich.console import Console

    return Console(highlight=False)


@contextmanager
def to_terminal(
    screen: Console | Stream,
    *,
    least: int = logging.INFO,
    silent: bool = False,
    own_process: bool = True,
) -> Iterator[None]:
    """Print messages of level `least` and above, above the progress bar if there is one.

    Without `own_process`, stdout is another program's and stays as it is.
    """
    handler: logging.Handler
    if own_process:
        accept_all_text(screen.file)
    if isinstance(screen, Stream) or not screen.is_terminal:
        handler = _TerminalHandler(cast(TextIO, screen.file), own_process=own_process)
    else:
        from steadyrl.training.logging.progress_bar import AboveTheBar

        handler = AboveTheBar(screen)
    handler.setFormatter(_TerminalFormatter())
    handler.setLevel(NEVER if silent else least)
    with attached(handler):
        yield


def open_progress(
    screen: Console | Stream, total: int, label: str = "", *, silent: bool = False
) -> Bar | Lines:
    """Return a progress bar on a terminal, else a printer of plain lines."""
    if silent or isinstance(screen, Stream) or not screen.is_terminal:
        return Lines(total, label)
    from steadyrl.training.logging.progress_bar import Bar

    return Bar(screen, total, label)
