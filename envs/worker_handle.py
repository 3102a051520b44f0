"""The parent's end of a worker: start it, talk to it, wait for it with a limit, kill it."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import multiprocessing
import os
import resource
import select
import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from envs.faults import WorkerError
from envs.types import EnvironmentFailedError
from envs.worker import BROKEN, HELD, QUIT, Job, run_worker
from memory.errors import SettingError

LOG = logging.getLogger("steadyrl")
KILL_SECONDS = 5.0
LISTEN_SECONDS = 0.2  # how often a long wait looks whether it is in vain
SPAWN_SECONDS = 30.0  # a spawned process loads its modules first


class WorkerHandle:
    """One worker process and the pipe to it."""

    def __init__(self, job: Job, others: Sequence[Connection], methods: Sequence[str]) -> None:
        self.job = job
        try:
            self.pipe, child = multiprocessing.Pipe()
        except OSError as error:
            raise no_process(job.env, error) from error
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
        left = deadline - time.monotonic()
        while not self._ready.poll(1000 * max(0.0, min(left, LISTEN_SECONDS))):
            # A child of the environment may hold the pipe of a dead process open.
            if self._process.exitcode is not None and not self._ready.poll(0):
                raise WorkerError(self._death())
            left = deadline - time.monotonic()
            if left <= 0:
                self._hangs = True
                raise WorkerError(f"no answer within {self.job.settings.step_timeout:g} s")
        try:
            message = self.pipe.recv_bytes()
        except (EOFError, OSError):
            raise WorkerError(self._death()) from None
        if message[:1] == BROKEN:
            what, trace, refused, for_good, raised = json.loads(message[1:])
            if refused is not None:
                raise SettingError(*refused)
            raise WorkerError(what, trace, for_good=for_good, raised=raised)
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
        """End the process and all it has started, by force once the grace period is over."""
        if self.pipe.closed:
            return
        self._process.join(0.0 if self._hangs else grace)
        ended = self._process.exitcode is not None
        _kill_group(self._process.pid, ended=ended)
        if not ended:
            self._process.kill()
            self._process.join(KILL_SECONDS)
        self.pipe.close()
        try:
            self._process.close()
        except ValueError:  # not even SIGKILL ends a process that waits for a broken device
            LOG.error("the process of environment %d cannot be ended", self.job.env)


def _kill_group(leader: int, *, ended: bool) -> None:
    """Kill what is left of a worker's session: its own children, and itself.

    The number of a process that has ended may be another's by now, but only if its group is gone.
    """
    try:
        group = os.getpgid(leader)
    except ProcessLookupError:
        ours = ended
    else:
        ours = not ended and group == leader  # else it has not come to have a session of its own
    if ours:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)


def _start(job: Job, child: Connection, inherited: list[Connection], methods: Sequence[str]) -> Any:
    """Start the process by the first method that works."""
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
        except KeyboardInterrupt:  # held back until now
            process.kill()
            process.join(KILL_SECONDS)
            raise
        except OSError as error:
            if error.errno != errno.ENOMEM or method == methods[-1]:
                raise no_process(job.env, error) from error
            # There is no memory for a copy of this process, but perhaps for a fresh one.
            LOG.warning("cannot %s a process for environment %d: %s", method, job.env, error)
    raise AssertionError("there is a way to start a process")


def no_process(env: int, error: OSError) -> EnvironmentFailedError:
    """Name the limit for which an environment cannot have its process."""
    limits = {
        errno.EMFILE: ("files open", "-n", resource.RLIMIT_NOFILE),
        errno.EAGAIN: ("processes", "-u", resource.RLIMIT_NPROC),
    }
    reason = error.strerror or str(error)
    if error.errno in limits:
        what, flag, limit = limits[error.errno]
        most = resource.getrlimit(limit)[0]
        number = "unlimited" if most == resource.RLIM_INFINITY else str(most)
        reason += f"; the limit of {what} (ulimit {flag}) is {number}: raise it"
        reason += " or use fewer env.num_envs"
    return EnvironmentFailedError(f"environment {env} can have no process: {reason}")


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold signals back until the child minds its own; forking beside threads is what we mean."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
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
