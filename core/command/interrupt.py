"""Ctrl-C while a program is imported, before it has a handler that knows more."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import NoReturn


def end_on_interrupt() -> None:
    """Let Ctrl-C end this process without a traceback: imports take a moment."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _leave)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    del frame
    os._exit(128 + number)  # as shells report a signal
