"""End well when asked to: at once before and after a run, after the next update during it.

Nothing here imports more than the interpreter has loaded already: it must be in place before the
imports that take long.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

# A terminal that closes (SIGHUP) ends a run like the others, unless nohup has it ignored.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SIGNAL_EXIT = 128  # what a shell adds to the number of the signal that ended a process


class StoppedError(KeyboardInterrupt):
    """The process was asked to end at once."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = SIGNAL_EXIT + number


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let a signal end the whole process without a traceback, with the code of that signal."""
    _handle(_stop_at_once)
    try:
        yield
    except KeyboardInterrupt as error:
        sys.exit(getattr(error, "exit_code", SIGNAL_EXIT + signal.SIGINT))
    finally:
        # The interpreter takes its time to end; nobody wants a traceback of that.
        _handle(_exit)


class StopSignals:
    """Once a run has begun, the first signal is noted; a second one ends it at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._waiting: int | None = None
        self._begun = self._shielded = False
        self._before: dict[int, Any] = {}

    def begin(self) -> None:
        """Note signals from now on: there is something to lose."""
        self._begun = True

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """Let a second signal wait until a short piece of work is done."""
        self._shielded = True
        try:
            yield
        finally:
            self._shielded = False
            if self._waiting is not None:
                raise StoppedError(self._waiting)

    def __enter__(self) -> StopSignals:
        self._before = _handle(self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int) -> None:
        if not self._begun:
            _stop_at_once(number)
        elif self.received is None:
            self.received = number
            _say("stopping after this update; again to stop now")
        elif self._shielded:
            self._waiting = number
        else:
            raise StoppedError(number)


def _stop_at_once(number: int) -> None:
    _say("stopping")
    raise StoppedError(number)


def _exit(number: int) -> None:
    os._exit(SIGNAL_EXIT + number)


def _handle(action: Callable[[int], None]) -> dict[int, Any]:
    """Let signals lead to `action` in this process; return the handlers there were."""
    if threading.current_thread() is not threading.main_thread():
        return {}  # a launcher that runs jobs in threads stops them by its own means
    owner = os.getpid()

    def act(number: int, frame: FrameType | None) -> None:
        # A process forked from this one has these handlers too at first, and no run to stop.
        if os.getpid() == owner:
            action(number)

    before: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}
    if before[signal.SIGHUP] == signal.SIG_IGN:  # nohup
        del before[signal.SIGHUP]
    for number in before:
        signal.signal(number, act)
    return before


def _say(line: str) -> None:
    """Write a line as a signal handler may: print could be in the middle of one already."""
    with suppress(OSError):
        begin = "\n" if os.isatty(2) else ""  # a progress bar may be on the line
        os.write(2, f"{begin}{line}\n".encode())
