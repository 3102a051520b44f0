"""`os._exit` in user code raises: it would end a run, or a sweep of runs, without a word."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from steadyrl.core.user_frames import is_user_code


@contextmanager
def exits_raise() -> Iterator[None]:
    """Raise SystemExit where user code calls `os._exit` in this process's main thread.

    Forked processes, other threads, Python's own calls and those of libraries end as they mean to.
    """
    end_process, owner = os._exit, os.getpid()

    def _exit(status: int) -> None:
        ours = os.getpid() == owner and threading.current_thread() is threading.main_thread()
        if ours and is_user_code(sys._getframe(1).f_code.co_filename):
            raise SystemExit(f"os._exit({status}) was called")
        end_process(status)

    os._exit = _exit  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = end_process
