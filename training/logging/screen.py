"""Choose how progress is shown: lines, or a bar on a terminal."""

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
    _ForTerminal,
    _Terminal,
    accept_all_text,
    attached,
)

if TYPE_CHECKING:
    from rich.console import Console

    from steadyrl.training.logging.progress_bar import Bar


# By these people ask for a terminal where there seems to be none.
ASKED_FOR = {"FORCE_COLOR", "TTY_COMPATIBLE"}


def find_screen() -> Console | Stream:
    """Return what this process prints to."""
    # Python has none where it was started without: messages go to stderr then.
    watched = sys.stdout is not None and sys.stdout.isatty()
    if not watched and not ASKED_FOR & os.environ.keys():
        return Stream(sys.stdout)
    from rich.console import Console

    return Console(highlight=False)


@contextmanager
def to_terminal(
    screen: Console | Stream, *, least: int = logging.INFO, silent: bool = False
) -> Iterator[None]:
    """Show messages of a level on the terminal, above the progress bar where there is one."""
    handler: logging.Handler
    accept_all_text(screen.file)
    if isinstance(screen, Stream) or not screen.is_terminal:
        handler = _Terminal(cast(TextIO, screen.file))
    else:
        from steadyrl.training.logging.progress_bar import AboveTheBar

        handler = AboveTheBar(screen)
    handler.setFormatter(_ForTerminal())
    handler.setLevel(NEVER if silent else least)
    with attached(handler):
        yield


def open_progress(
    screen: Console | Stream, total: int, label: str = "", *, silent: bool = False
) -> Bar | Lines:
    """Return the progress that suits where the output goes, of a run that may have a label."""
    if silent or isinstance(screen, Stream) or not screen.is_terminal:
        return Lines(total, label)
    from steadyrl.training.logging.progress_bar import Bar

    return Bar(screen, total, label)
