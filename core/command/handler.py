"""Signal handlers of one process: those it forks end by the signals, as by default."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import cache
from types import FrameType


class Handler:
    """Calls `action` with a signal's number, in the process that made the handler.

    `ends_forked`: the signal ends processes that this one forks.
    """

    def __init__(self, action: Callable[[int], object], *, ends_forked: bool) -> None:
        self._action, self._owner, self.ends_forked = action, os.getpid(), ends_forked
        if ends_forked:
            _register_once()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if os.getpid() == self._owner:
            self._action(number)
        elif self.ends_forked:  # forked by native code, which Python does not notice
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


@cache
def _register_once() -> None:
    os.register_at_fork(after_in_child=_restore_defaults)


def _restore_defaults() -> None:
    """Let the kernel end a forked process.

    Handlers run between two bytecodes: a signal just before a call that waits would be lost.
    """
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if isinstance(handler, Handler) and handler.ends_forked:
            signal.signal(number, signal.SIG_DFL)
