"""The stack of a process that hangs: `faulthandler` writes it into the process's own pipe.

Its handler runs in C, so it answers from native code that never returns, too.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

# One that nobody else sends: the stack would be read as a reply. Only Linux has it.
REQUEST: int = getattr(signal, "SIGRTMAX", signal.SIGUSR2)
SECONDS = 1.0  # within which a process writes it: one that is suspended does not


def write_stack_on_request(pipe: Connection) -> None:
    """Let REQUEST write the stack of this process's main thread into its pipe."""
    faulthandler.register(REQUEST, file=pipe.fileno(), all_threads=False)


def request_stack(pid: int, pipe: Connection, entry: Callable[..., object]) -> str:
    """Return the frames that a process called `entry` for, innermost first; "" if there are none.

    Nothing else can be read from its pipe afterwards: such a process is killed.
    """
    text, end = b"", f" in {entry.__name__}\n".encode()
    ready, deadline = select.poll(), time.monotonic() + SECONDS
    ready.register(pipe.fileno(), select.POLLIN)
    with suppress(OSError):  # it has ended meanwhile
        os.kill(pid, REQUEST)
        while end not in text and ready.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
            part = os.read(pipe.fileno(), 65_536)
            if not part:
                break
            text += part
    # A forked process has its parent's frames below its own.
    return text.partition(end)[0].rpartition(b"\n")[0].decode(errors="replace")
