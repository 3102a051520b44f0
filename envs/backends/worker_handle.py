"""Parent side of a worker process: start it, send and receive with a timeout, kill it."""

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
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

from steadyrl.core.errors import MemoryBudgetError, SettingError
from steadyrl.core.user_frames import place_and_frames
from steadyrl.envs.arithmetic import flushes_subnormals
from steadyrl.envs.backends.call_stack import request_stack
from steadyrl.envs.backends.worker import FAILED, LEFT_TO_TRAINER, QUIT, WorkerConfig, run_worker
from steadyrl.envs.descendants import end_marked, is_over, new_mark
from steadyrl.envs.faults import WorkerError
from steadyrl.envs.registration import WORKER
from steadyrl.envs.settings import EnvSettings
from steadyrl.envs.types import EnvironmentFailedError, EnvSpec, spec_of
from steadyrl.memory.host.kills import kernel_kills
from steadyrl.memory.process import readable

log = logging.getLogger("steadyrl")
SHARED_MEMORY = "/dev/shm"  # a file system of 64 MB in most containers
KILL_SECONDS = 5.0
POLL_SECONDS = 0.2  # how often a long wait checks that the process lives
CLOSE_SECONDS = 2.0
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
SPAWN_SECONDS = 30.0  # additional startup time of a spawned process
STOPPED_SECONDS = 1.0  # between two looks at a reply: this process was stopped meanwhile


class WorkerHandle:
    """A worker process and the pipe to it."""

    def __init__(self, config: WorkerConfig, others: Sequence[Connection] = ()) -> None:
        self.config = config
        self._kills = kernel_kills()
        self._mark = new_mark()
        try:
            self.pipe, child = multiprocessing.Pipe()
        except OSError as error:
            raise no_process(config.env, error) from error
        try:
            self._process = _start(config, child, [self.pipe, *others], self._mark)
            # At exit Python would end it by SIGTERM, which it ignores, and wait for it.
            Finalize(self, _kill_if_open, (self._process,), exitpriority=0)
        except BaseException:
            self.pipe.close()
            raise
        finally:
            child.close()
        self._hangs = False
        self._ready = select.poll()
        self._ready.register(self.pipe.fileno(), select.POLLIN)

    def send(self, message: bytes) -> None:
        """Send a command; a dead worker is noticed by `recv`."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send_bytes(message)

    def recv(self, deadline: Deadline) -> bytes:
        """Wait for the reply to a command; raise WorkerError if none comes before the deadline."""
        left = deadline.left()
        while not self._ready.poll(1000 * max(0.0, min(left, POLL_SECONDS))):
            # A child process of the environment may keep a dead worker's pipe open.
            if self._process.exitcode is not None and not self._ready.poll(0):
                raise self._death()
            left = deadline.left()
            if left <= 0:
                raise self._hanging()
        try:
            message = self.pipe.recv_bytes()
        except (EOFError, OSError):
            raise self._death() from None
        if message[:1] == FAILED:
            what, trace, refused, fatal, raised, frames = json.loads(message[1:])
            error = WorkerError(what, trace, fatal=fatal, raised=raised, user_frames=frames)
            if refused is not None:
                raise SettingError(*refused) from error
            raise error
        return message[1:]

    def _hanging(self) -> WorkerError:
        """Return the error for a worker that does not answer, with the place where it hangs."""
        self._hangs = True
        stack = request_stack(self._process.pid or 0, self.pipe, run_worker)
        place, frames = place_and_frames(stack)
        what = f"no answer within env.step_timeout={self.config.settings.step_timeout:g} s"
        return WorkerError(what + (place and f" ({place})"), stack, user_frames=frames)

    def _death(self) -> Exception:
        """Return the error for a process that has ended, or has closed its pipe."""
        self._join(KILL_SECONDS)
        code = self._process.exitcode
        if code is None:
            return WorkerError("its process closed its pipe")
        if code == -signal.SIGKILL and kernel_kills() > self._kills:
            from steadyrl.memory.budget import tightest_bound  # imports torch

            return MemoryBudgetError(
                "the kernel killed the environment's process because memory ran out "
                f"({tightest_bound().name}): give the run more memory, or lower env.num_envs or "
                "agent.replay.capacity"
            )
        if code < 0:
            stack = "; env.backend=sync writes the stack to train.log" if -code in CRASHES else ""
            return WorkerError(f"its process was killed by {signal.Signals(-code).name}{stack}")
        return WorkerError(f"its process exited with code {code}")

    def _join(self, seconds: float) -> None:
        """Wait for the process to end.

        `Process.join` waits for the end of a pipe instead, which forked daemons may hold open.
        """
        if self._process.exitcode is not None:
            return
        try:
            handle = os.pidfd_open(self._process.pid or 0)
        except (AttributeError, OSError):  # not on Linux, or no handles are left
            self._process.join(seconds)
            return
        try:
            is_over(handle, seconds)
        finally:
            os.close(handle)

    def quit(self) -> None:
        """Tell the worker to close its environment and exit."""
        self.send(QUIT)

    def kill(self, grace: float = 0.0) -> None:
        """End the process and all it has started, by force after the grace period."""
        kill_all([self], grace)

    def _kill(self, grace: float) -> None:
        """End the process and its session."""
        if self.pipe.closed:
            return
        self._join(0.0 if self._hangs else grace)
        ended = self._process.exitcode is not None
        kill_group(self._process.pid, ended=ended)
        if not ended:
            self._process.kill()
            self._join(KILL_SECONDS)
        self.pipe.close()
        try:
            self._process.close()
        except ValueError:  # a process in uninterruptible sleep survives SIGKILL
            log.error("the process of environment %d cannot be ended", self.config.env)


def _kill_if_open(process: Any) -> None:
    """Kill a process whose handle was not closed."""
    with contextlib.suppress(ValueError):  # it was
        process.kill()


def kill_all(workers: Sequence[WorkerHandle], grace: float) -> None:
    """End processes and all that they have started, within one grace period."""
    open_ones = [worker for worker in workers if not worker.pipe.closed]
    end = time.monotonic() + grace
    for worker in open_ones:
        worker._kill(max(0.0, end - time.monotonic()))
    if open_ones:
        end_marked({worker._mark for worker in open_ones})


def kill_group(leader: int, *, ended: bool) -> None:
    """Kill what is left of a worker's session: the worker and its children.

    The pid of an ended process may have been reused, but only if its process group is gone.
    """
    try:
        group = os.getpgid(leader)
    except ProcessLookupError:
        ours = ended
    else:
        ours = not ended and group == leader  # else it has not created its session yet
    if ours:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)


def _start(config: WorkerConfig, child: Connection, inherited: list[Connection], mark: int) -> Any:
    """Start the process with the first start method that works."""
    methods, flush = start_methods(), flushes_subnormals()
    role = config.settings.role.strip()  # evaluation's workers have the numbers of training's
    name = f"{WORKER}{config.env}" + (f" ({role})" if role else "")
    for method in methods:
        context: Any = multiprocessing.get_context(method)
        arguments = (config, child, inherited if method == "fork" else [], mark, flush)
        process = context.Process(target=run_worker, args=arguments, daemon=True, name=name)
        try:
            with _children_allowed(), warnings.catch_warnings():
                # Forking a multi-threaded process is intended.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            return process
        except OSError as error:
            if error.errno != errno.ENOMEM or method == methods[-1]:
                raise no_process(config.env, error) from error
            # Out of memory for a fork; a spawned process may fit.
            log.warning("cannot %s a process for environment %d: %s", method, config.env, error)
    raise AssertionError("at least one start method is available")


@contextlib.contextmanager
def _children_allowed() -> Iterator[None]:
    """Let this process start workers though it is daemonic, as one of multiprocessing.Pool is.

    Such a process may have no children because they could outlive it: workers end with it.
    """
    current = multiprocessing.current_process()
    is_daemonic = current.daemon
    if is_daemonic:
        current.daemon = False
    try:
        yield
    finally:
        if is_daemonic:
            current.daemon = True


def no_process(env: int, error: OSError) -> EnvironmentFailedError:
    """Return the error for a failed process start, naming the limit that was hit."""
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


def validate_shared_memory(nbytes: int, num_envs: int) -> None:
    """Raise MemoryBudgetError unless so many bytes of shared memory are free.

    multiprocessing would take a file in the temporary directory instead, on a disk.
    """
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:  # there is none: the temporary directory is what is left
        return
    free = found.f_bavail * found.f_frsize
    if nbytes > free:
        raise MemoryBudgetError(
            f"shared memory of {num_envs} environments needs {readable(nbytes)} but "
            f"{readable(free)} are free in {SHARED_MEMORY}: make it larger (docker run "
            "--shm-size=1g), lower env.num_envs, or use env.backend=sync"
        )


def no_shared_memory(error: OSError) -> EnvironmentFailedError:
    """Return the error for failed shared memory, naming its directory."""
    if error.filename is None or error.errno in (errno.EMFILE, errno.ENFILE):
        return no_process(0, error)
    where, reason = os.path.dirname(error.filename), error.strerror or str(error)
    return EnvironmentFailedError(
        f"cannot create shared memory for environments in {where}: {reason}; make it writable, "
        "or use env.backend=sync"
    )


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Delay signals until a new process has set its own handlers and its handle is stored."""
    received: list[int] = []
    with contextlib.ExitStack() as restored:
        restored.callback(_raise, received)
        if threading.current_thread() is threading.main_thread():
            # The kernel may deliver to another thread, but Python runs the handler in this one.
            for number in LEFT_TO_TRAINER:
                if callable(handler := signal.getsignal(number)):
                    restored.callback(signal.signal, number, handler)
                    signal.signal(number, lambda number, _: received.append(number))
        before = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_TRAINER)
        restored.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
        yield


def _raise(signals: list[int]) -> None:
    for number in signals:
        signal.raise_signal(number)


def start_methods() -> tuple[str, ...]:
    """Return the multiprocessing start methods to try, the fastest safe one first.

    Never fork a process that has initialised CUDA: the child would keep GPU memory allocated.
    """
    available = multiprocessing.get_all_start_methods()
    torch = sys.modules.get("torch")
    works_on_gpu = torch is not None and torch.cuda.is_initialized()
    forks = os.uname().sysname == "Linux" and not works_on_gpu
    safe = ("fork", "spawn") if forks else ("spawn",)
    return tuple(method for method in safe if method in available)


class Deadline:
    """The time within which replies must arrive.

    It stands still while this process is stopped, as by SIGSTOP or `docker pause`: the workers are
    stopped too.
    """

    def __init__(self, seconds: float) -> None:
        self._left, self._read = seconds, time.monotonic()

    def left(self) -> float:
        """Return the seconds left; whoever waits asks every `POLL_SECONDS`."""
        now = time.monotonic()
        passed, self._read = now - self._read, now
        self._left -= passed if passed < STOPPED_SECONDS else POLL_SECONDS
        return self._left


def deadline(settings: EnvSettings, *, starting: bool = False) -> Deadline:
    """Return the deadline for replies; `starting`: from processes that start now."""
    slow = starting and start_methods()[0] != "fork"
    return Deadline(settings.step_timeout + (SPAWN_SECONDS if slow else 0.0))


def query_subprocess(settings: EnvSettings, *, trial: bool = False) -> bytes:
    """Build an environment in a separate process; return its spaces, or with `trial` its step time.

    Nothing the environment does can harm this process; failures raise WorkerError.
    """
    config = WorkerConfig(settings, 0, 0, -1, None, None, trial)
    with contextlib.ExitStack() as ended:
        with signals_blocked():
            worker = WorkerHandle(config)
            ended.callback(worker.kill)
        reply = worker.recv(deadline(settings, starting=True))
        worker.quit()
        worker.kill(CLOSE_SECONDS)
        return reply


class Description(NamedTuple):
    """A worker's description of its environment."""

    spec: EnvSpec
    limits: tuple[float, float] | None  # as `Encoder.limits`
    spaces: str  # as `SingleEnv.spaces`
    remarks: list[str]  # as `SingleEnv.remarks`
    code: dict[str, list[str]]  # `SingleEnv.code_of` step and reset


def read_description(text: bytes) -> Description:
    """Parse the description that a worker sent."""
    plain, described, limits, *rest = json.loads(text)
    spec = replace(spec_of(plain), spaces=described)
    return Description(spec, None if limits is None else tuple(limits), *rest)
