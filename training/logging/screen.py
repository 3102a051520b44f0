"""Choose how a run is shown: a live line on a terminal, plain lines otherwise."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import TYPE_CHECKING, TextIO, TypeGuard, cast

from steadyrl.core.clock import doing, shown_by
from steadyrl.memory.host.malloc import use_one_arena
from steadyrl.training.logging.display import Display, Lines
from steadyrl.training.logging.terminal import (
    NEVER,
    Stream,
    TerminalFormatter,
    TerminalHandler,
    accept_all_text,
    attached,
    not_switched_off,
)

if TYPE_CHECKING:
    from rich.console import Console


# Environment variables that ask for terminal output where stdout is no terminal.
ASKED_FOR = {"FORCE_COLOR", "TTY_COMPATIBLE"}


def find_screen(*, stderr: bool = False) -> Console | Stream:
    """Return the rich console of a terminal, or the plain output stream."""
    # sys.stdout is None if Python was started with it closed; messages go to stderr then.
    stream = sys.stderr if stderr else sys.stdout
    watched = getattr(stream, "isatty", bool)()  # a program's own stream may only write
    if not watched and not ASKED_FOR & os.environ.keys():
        return Stream(stream)
    from steadyrl.training.logging.progress_bar import LiveConsole

    return LiveConsole(stderr=stderr, highlight=False)


def _is_live(screen: Console | Stream) -> TypeGuard[Console]:
    """Return whether a line can be replaced; Emacs' shells are terminals that cannot."""
    return not isinstance(screen, Stream) and screen.is_terminal and not screen.is_dumb_terminal


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
    if not _is_live(screen):
        handler = TerminalHandler(cast(TextIO, screen.file), own_process=own_process)
    else:
        from steadyrl.training.logging.progress_bar import AboveTheBar

        handler = AboveTheBar(screen)
    handler.setFormatter(TerminalFormatter())
    handler.setLevel(NEVER if silent else least)
    with not_switched_off() if own_process else nullcontext(), attached(handler):
        yield


def find_display(screen: Console | Stream, total: int, label: str, *, silent: bool) -> Display:
    """Return a live line for a terminal, else a printer of plain lines."""
    if silent:
        return Display(total, label)
    if not _is_live(screen):
        return Lines(total, label)
    from steadyrl.training.logging.progress_bar import Bar

    return Bar(screen, total, label)


@contextmanager
def displayed(
    screen: Console | Stream,
    total: int,
    label: str = "",
    *,
    least: int = logging.INFO,
    silent: bool = False,
    own_process: bool = True,
) -> Iterator[Display]:
    """Print messages, and show what the run is doing until the display is closed."""
    with to_terminal(screen, least=least, silent=silent, own_process=own_process):
        display = find_display(screen, total, label, silent=silent)
        with closing(display), shown_by(display.activity):
            if own_process:
                use_one_arena()  # before the first thread
            if not silent:
                display.start()
            yield display


@contextmanager
def loading(*, silent: bool, own_process: bool) -> Iterator[None]:
    """Show that torch is being loaded, which takes long if the disk has to be read."""
    if "torch" in sys.modules:
        yield
        return
    display = displayed(find_screen(), total=0, silent=silent, own_process=own_process)
    with display, doing("loading torch"):
        yield


@contextmanager
def displayed_on_stderr() -> Iterator[None]:
    """Show on a terminal what a program is doing whose result goes to stdout; print warnings."""
    with displayed(find_screen(stderr=True), total=0, least=logging.WARNING):
        yield
