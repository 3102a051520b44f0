"""A process that kills this one if a signal finds it stuck in an environment's native code.

Python runs signal handlers between two bytecodes, so native code that never returns (a simulator
that blocks and holds the GIL) blocks handlers and all threads. The signal's number is still written
to a file descriptor (`signal.set_wakeup_fd`), which the other process reads.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from steadyrl.envs.vector import VectorEnv
from steadyrl.training.checkpoints.run_directory import resume_override
from steadyrl.training.run.watcher_process import (
    ALLOWED,
    BEGUN,
    LOG,
    LONGEST_LOG,
    QUIT,
    TOGETHER,
    WORDS,
)

log = logging.getLogger("steadyrl")

PROGRAM = Path(__file__).with_name("watcher_process.py")
QUIT_SECONDS = 2.0


class Watcher:
    """Runs the watcher process while a run lasts; does nothing where there can be none.

    It receives signal numbers by a socket, whose packets name the sending process, sees the current
    step in shared memory, and ends with this process, which it knows by a pidfd.
    """

    def __init__(self, patience: float, *, together: bool, enabled: bool = True) -> None:
        """Start the process, if `enabled`; do not wait until it is ready."""
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._before = -1  # the previous wakeup fd
        size = 8 * WORDS
        self._numbers = memoryview(bytearray(size)).cast("Q")
        self._patience: Callable[[], float] = lambda: 0.0
        able = enabled and sys.platform == "linux" and hasattr(os, "pidfd_open")
        if not able or threading.current_thread() is not threading.main_thread():
            return
        try:
            shared = os.memfd_create("steadyrl-watcher")
            try:
                os.ftruncate(shared, size)
                self._numbers = memoryview(mmap.mmap(shared, size)).cast("Q")
                self.allow(patience)
                self._numbers[TOGETHER] = together
                self._start(shared)
            finally:
                os.close(shared)
        except OSError as error:
            log.debug("the watcher process cannot be started: %s", error)

    def _start(self, shared: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            ours.setblocking(False)
            trainer = os.pidfd_open(os.getpid())
            handles = (theirs.fileno(), shared, trainer)
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(PROGRAM), *map(str, (*handles, os.getpid()))],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=handles,
                    cwd="/",
                    start_new_session=True,  # Ctrl-C is for the run alone
                )
            except OSError:
                ours.close()
                raise
            finally:
                os.close(trainer)
        self._socket = ours
        self._before = signal.set_wakeup_fd(ours.fileno(), warn_on_full_buffer=False)

    def watch(self, envs: Sequence[VectorEnv], patience: Callable[[], float]) -> None:
        """Watch these environments' steps, which may take `patience()` seconds after a signal."""
        self._patience = patience
        for env in envs:
            env.clock.show_in(self._numbers)
            env.clock.on_slower = self._slower
        self._slower()

    def log_to(self, path: Path) -> None:
        """Let the process write its line, if it has one, to the run's log too."""
        sent = os.fsencode(f"{path}\0{resume_override(path.parent)}")
        with suppress(OSError):  # it is gone
            if self._socket is not None and len(sent) <= LONGEST_LOG:
                self._socket.send(LOG + sent)

    def begun(self) -> None:
        """Mark the run as begun: from now on only environments' steps are watched."""
        self._numbers[BEGUN] = 1

    def _slower(self) -> None:
        self.allow(self._patience())

    def allow(self, seconds: float) -> None:
        """Set how long a step may take after a signal."""
        self._numbers[ALLOWED] = round(1000 * seconds)

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *_: object) -> None:
        """End the process."""
        if self._socket is None or self._process is None:
            return
        found = signal.set_wakeup_fd(-1)
        # A wakeup fd that an environment has set meanwhile stays.
        stays = self._before if found == self._socket.fileno() else found
        with suppress(OSError, ValueError):  # it may be closed by now
            signal.set_wakeup_fd(stays)
        with self._socket, suppress(OSError):
            self._socket.send(QUIT)
        try:
            self._process.wait(QUIT_SECONDS)
        except subprocess.TimeoutExpired:  # suspended, or not started yet
            self._process.kill()
            self._process.wait()
