"""The parent's end of a worker: start it, talk to it, wait for it with a limit, kill it."""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import select
import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from envs.faults import WorkerError
from envs.worker import BROKEN, QUIT, Job, run_worker
from memory.errors import SettingError

LOG = logging.getLogger("steadyrl")
KILL_SECONDS = 5.0
SPAWN_SECONDS = 30.0  # a spawned process loads its modules first


class WorkerHandle:
    """One worker process and the pipe to it."""

    def __init__(self, job: Job, others: Sequence[Connection], methods: Sequence[str]) -> None:
        self.job = job
        self.pipe, child = multiprocessing.Pipe()
        try:
            self._process = _start(job, child, [self.pipe, *others], methods)
        except BaseException:
            self.pipe.close()
            raise
        finally:
            child.close()
        self._hangs = False
        self._ready = select.poll()
        self._ready.register(self.pipe.fileno(), select.POLLIN)

    def send(self, message: bytes) -> None:
        """Send a command; that nobody is there any more is noticed when its answer is due."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send_bytes(message)

    def answer(self, deadline: float) -> bytes:
        """Wait for the answer to a command; raise WorkerError when none comes in time."""
        left = max(0.0, deadline - time.monotonic())
        if not self._ready.poll(left * 1000):
            self._hangs = True
            raise WorkerError(f"no answer within {self.job.settings.step_timeout:g} s")
        try:
            message = self.pipe.recv_bytes()
        except (EOFError, OSError):
            raise WorkerError(self._death()) from None
        if message[:1] == BROKEN:
            what, trace, refused, for_good = json.loads(message[1:])
            if refused is not None:
                raise SettingError(*refused)
            raise WorkerError(what, trace, for_good=for_good)
        return message[1:]

    def _death(self) -> str:
        self._process.join(KILL_SECONDS)
        code = self._process.exitcode
        if code is None:
            return "its process closed its pipe"
        if code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        return f"its process exited with code {code}"

    def quit(self) -> None:
        """Ask the worker to close its environment and end."""
        self.send(QUIT)

    def kill(self, grace: float = 0.0) -> None:
        """End the process, by force once the grace period is over, and free its descriptors."""
        if self.pipe.closed:
            return
        self._process.join(0.0 if self._hangs else grace)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join(KILL_SECONDS)
        self.pipe.close()
        try:
            self._process.close()
        except ValueError:  # not even SIGKILL ends a process that waits for a broken device
            LOG.error("the process of environment %d cannot be ended", self.job.env)


def _start(job: Job, child: Connection, inherited: list[Connection], methods: Sequence[str]) -> Any:
    """Start the process by the first method that works."""
    problem: OSError | None = None
    for method in methods:
        context: Any = multiprocessing.get_context(method)
        arguments = (job, child, inherited if method == "fork" else [])
        process = context.Process(
            target=run_worker, args=arguments, daemon=True, name=f"environment-{job.env}"
        )
        try:
            with _interrupts_held():
                process.start()
            return process
        except OSError as error:  # such as no memory for a copy of this process
            problem = error
            LOG.warning("cannot %s a process for environment %d: %s", method, job.env, error)
    raise WorkerError(f"no process could be started: {problem}")


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back until the child ignores it; forking beside threads is what we mean."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_methods() -> tuple[str, ...]:
    """Return the ways to start a process, the fastest safe one first."""
    available = multiprocessing.get_all_start_methods()
    return tuple(m for m in ("fork", "spawn") if m in available and (m != "fork" or _is_linux()))


def _is_linux() -> bool:
    return os.uname().sysname == "Linux"
