"""Stop a run by signals: after the current step if that is soon enough, at once if not."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, Protocol

from steadyrl.agents.learner.interrupt import Interrupted, Stop
from steadyrl.core.command.handler import Handler
from steadyrl.core.errors import interrupt_kept
from steadyrl.core.user_frames import place_of_stack
from steadyrl.envs.user_exit import exits_raise
from steadyrl.envs.vector import VectorEnv
from steadyrl.training.config.settings import RunSettings
from steadyrl.training.run.watcher_process import ENDING, ORPHANED, STOPPING, Repeats

log = logging.getLogger("steadyrl")

# These end a process that an environment has forked, as by default. Ctrl-C does not: the terminal
# sends it to such processes too, and the current step needs them.
ENDING_CHILDREN = {*ENDING} - {signal.SIGINT}

SIGNAL_EXIT = 128  # what a shell adds to the number of the signal that ended a process

STEP_SECONDS = 3.5  # that the current step may still take, where steps are fast

RANKS_SECONDS = 20.0  # the same among ranks, which have to agree; torchrun kills after 30

LAST_SECONDS = 0.8  # for cleaning up, once the current step is given up

# Python drops an exception raised in a weak reference's callback: raised again after this time.
RETRY_SECONDS = 0.02

THREAD_SECONDS = 60.0  # that other code's threads may take to end after all else has

LOOK_SECONDS = 1.0  # between two looks for handlers that an environment has replaced


class StoppedError(KeyboardInterrupt):
    """The process is to end at once."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = SIGNAL_EXIT + number


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let a signal end the process without a traceback, with exit code 128 + signal."""
    repeats, last = Repeats(), int(signal.SIGINT)

    def stop(number: int) -> None:
        nonlocal last
        if not repeats(number, time.monotonic()):
            last = _reason(number)
            _stop_at_once(number)

    _install(stop)
    _install(_nothing_to_save, (signal.SIGUSR1,))
    sys.unraisablehook = _leave_if_stopped
    try:
        with exits_raise(), interrupt_kept():
            yield
    except KeyboardInterrupt as error:
        # A library may have raised a KeyboardInterrupt of its own instead.
        _leave(getattr(error, "exit_code", SIGNAL_EXIT + last))
    except (ImportError, MemoryError, OSError) as error:
        from steadyrl.core.errors import exit_with, is_out_of_memory, startup_memory_error

        if not is_out_of_memory(error):
            raise
        exit_with(startup_memory_error(error))
    except SystemExit as ended:
        from steadyrl.training.run.rank_info import rank_info  # imports more than this module may

        code = ended.code
        # The connections of a failed rank would block the interpreter's exit.
        if isinstance(code, int) and (code > SIGNAL_EXIT or (code and rank_info().size > 1)):
            _leave(code)
        if isinstance(code, int) or code is None:
            _leave_threads(code or 0)
        raise
    else:
        _leave_threads(0)
    finally:
        # A signal while the interpreter exits should print no traceback.
        _install(_exit)


def _leave_if_stopped(lost: Any) -> None:
    """End the process if a StoppedError was raised where Python cannot propagate it."""
    if isinstance(lost.exc_value, StoppedError):
        _leave(lost.exc_value.exit_code)
    sys.__unraisablehook__(lost)


def _leave_threads(code: int) -> None:
    """Exit in a while if an environment has left threads, for which the interpreter waits."""
    if left := _threads():
        _print_line(f"waiting up to {THREAD_SECONDS:g} s for what still runs: {left}")
        threading.Thread(target=_leave_late, args=(code,), daemon=True).start()


def _threads() -> str:
    """Name the threads that the interpreter waits for."""
    main = threading.main_thread()
    return ", ".join(t.name for t in threading.enumerate() if not t.daemon and t is not main)


def _leave_late(code: int) -> None:
    time.sleep(THREAD_SECONDS)
    if left := _threads():
        _print_line(f"exiting although it still runs: {left}")
        _leave(code)


def _leave(code: int) -> NoReturn:
    """Exit at once: compilers and other threads may take seconds to end."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a closed pipe
            stream.flush()
    os._exit(code)


class StopSignals:
    """Stop the run after the current step at the first signal, at once at the second.

    The same signal within a moment is one that came twice (`timeout`), not a second request.

    A step that does not finish within `patience()` seconds (an environment hangs) counts as a
    second signal. Before `begin`, the first signal ends the process at once. Without `handle`
    nothing is installed: another program's process handles its own signals.
    """

    def __init__(self, *, handle: bool = True) -> None:
        self._handles, self._repeats = handle, Repeats()
        self._first: int | None = None  # signal
        self.save_requested = False  # by SIGUSR1; reset by whoever saves
        self.stop = Stop()  # checked between gradient steps
        self.patience: Callable[[], float] = lambda: STEP_SECONDS  # for the current step
        # Called with the seconds that a step is given.
        self.on_limit: Callable[[float], object] = lambda seconds: None
        self.on_begin: Callable[[], object] = lambda: None  # called by `begin`
        self.saving = False  # a checkpoint is being written, which has no time limit
        self._overdue = False
        self._waiting: int | None = None
        self._begun = self._shielded = self._retry = False
        self._before: dict[int, Any] = {}
        self._own: dict[int, Any] = {}  # handlers that an environment must not replace
        self._alarm: Any = signal.SIG_DFL  # handler of the time limit
        self._warned = self._reset_follows = False
        self._next_look = 0.0
        self._unraisable = sys.unraisablehook

    @property
    def received(self) -> int | None:
        """The signal that stops the run; among ranks, once all have agreed to stop."""
        if not self.stop.confirmed:
            return None
        return self._first or signal.SIGTERM  # received by another rank only

    def begin(self) -> None:
        """From now on, finish the current step and save before ending."""
        self.reinstall()
        self._begun = True
        self.on_begin()

    def on_timestep(self, *, ended: bool) -> None:
        """Reinstall handlers where environments were reset, and once a second.

        `ended`: the timestep ended episodes. Looking at every timestep would take microseconds.
        """
        now = time.monotonic()
        if self._reset_follows or now >= self._next_look:
            self.reinstall()
            self._next_look = now + LOOK_SECONDS
        self._reset_follows = ended

    def reinstall(self) -> None:
        """Install the handlers again that an environment has replaced by its own; warn once."""
        for number, own in self._own.items():
            found = signal.getsignal(number)
            if found is own:
                continue
            signal.signal(number, own)
            if not self._warned:
                name, where = signal.Signals(number).name, getattr(found, "__module__", "")
                log.warning(
                    "%s was handled by other code%s: the run handles it again, to save before it "
                    "ends", name, where and f" ({where})",
                )  # fmt: skip
            self._warned = True

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """Delay a second signal until a short critical section is done."""
        self._shielded = True
        try:
            yield
        finally:
            self._shielded = False
            if self._waiting is not None:
                raise StoppedError(self._waiting)

    def cancel_timeout(self) -> None:
        """Cancel the time limit once the current step is done: only a second signal counts now."""
        if self._first is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def __enter__(self) -> StopSignals:
        if not self._handles:
            return self
        self._before = _install(self._receive)
        self._before |= _install(self._save, (signal.SIGUSR1,))
        self._own = {number: signal.getsignal(number) for number in self._before}
        self._before |= _install(self._on_timeout, (signal.SIGALRM,))
        self._alarm = signal.getsignal(signal.SIGALRM)
        self._unraisable, sys.unraisablehook = sys.unraisablehook, self._raise_again
        return self

    def __exit__(self, *_: object) -> None:
        if not self._handles:
            return
        self.cancel_timeout()
        sys.unraisablehook = self._unraisable
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int) -> None:
        repeated = self._repeats(number, time.monotonic())
        if not self._begun:
            if not repeated:
                _stop_at_once(number)
        elif self._first is None:
            self._first = _reason(number)
            if not self.stop.multi_rank:
                _print_line("stopping after this step; signal again to stop at once")
            self._start_timeout()
            self.stop.request()
        elif self.stop.multi_rank or repeated:
            pass  # a launcher got the signal too, and forwards it
        elif self._shielded:
            self._waiting = number
        else:
            self._set_timer(LAST_SECONDS)
            self._overdue = True
            raise StoppedError(number)

    def step_limit(self) -> float:
        """Return the seconds that the current step may take after a signal."""
        seconds = self.patience()
        return max(RANKS_SECONDS, seconds) if self.stop.multi_rank else seconds

    def _start_timeout(self) -> None:
        limit = self.step_limit()
        self.on_limit(limit)
        self._set_timer(limit)

    def _set_timer(self, seconds: float) -> None:
        """Have `_on_timeout` called, also where an environment uses SIGALRM for its own timers."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGALRM, self._alarm)
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def _save(self, number: int) -> None:
        if self._begun:
            self.save_requested = True
            _print_line("saving a checkpoint after this step")

    def _raise_again(self, lost: Any) -> None:
        if isinstance(lost.exc_value, Interrupted) and self._first is not None:
            self._retry = True
            self._set_timer(RETRY_SECONDS)
        else:
            self._unraisable(lost)

    def _on_timeout(self, number: int) -> None:
        """Raise a lost Interrupted again, or end a step: by an exception, then by exiting."""
        assert self._first is not None
        if self._retry:
            self._retry = False
            self._start_timeout()
            self.stop.request()
            return
        if (self.saving or self._shielded) and not self._overdue:
            self._start_timeout()
            return
        if self._overdue:
            os._exit(SIGNAL_EXIT + self._first)
        self._overdue = True
        self._set_timer(LAST_SECONDS)
        place = place_of_stack(sys._getframe())
        where = place and f" ({place})"
        _print_line(f"the current step{where} did not finish in time: stopping without saving it")
        raise StoppedError(self._first)


def _stop_at_once(number: int) -> None:
    _print_line("stopping")
    raise StoppedError(_reason(number))


def _reason(number: int) -> int:
    """Return the signal that an exit code is made of."""
    return signal.SIGTERM if number == ORPHANED else number


def _nothing_to_save(number: int) -> None:
    del number


def _exit(number: int) -> None:
    os._exit(SIGNAL_EXIT + _reason(number))


def _install(action: Callable[[int], None], numbers: Iterable[int] = STOPPING) -> dict[int, Any]:
    """Handle signals by `action` in this process; return the previous handlers."""
    if threading.current_thread() is not threading.main_thread():
        return {}  # a launcher that runs jobs in threads stops them itself
    before: dict[int, Any] = {
        number: signal.getsignal(number) for number in numbers if not is_ignored(number)
    }
    for number in before:
        ends = number in ENDING_CHILDREN  # a process that an environment has forked has no run
        signal.signal(number, Handler(action, ends_forked=ends))
    return before


def is_ignored(number: int) -> bool:
    """Return whether the signal is a closed terminal's under `nohup`."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def _print_line(line: str) -> None:
    """Write a line to stderr; safe in a signal handler, where `print` may be interrupted itself."""
    with suppress(OSError):
        begin = "\n" if os.isatty(2) else ""  # after a progress bar
        os.write(2, f"{begin}{line}\n".encode())


SLOWEST_FACTOR = 2.0  # steps differ: one may take this many times as long as the slowest so far


class Timed(Protocol):
    """A part of a step whose calls are timed."""

    @property
    def slowest(self) -> float:
        """Seconds of the longest call so far."""

    @property
    def running(self) -> float:
        """Seconds that the running call has taken so far; 0: none is running."""


class Patience:
    """How long to wait for the current step: from the slowest so far and `env.step_timeout`."""

    def __init__(self, settings: RunSettings, envs: Sequence[VectorEnv]) -> None:
        chosen = settings.stop_timeout
        self._chosen = None if chosen == "auto" else chosen
        self._step_timeout, self._envs = settings.env.step_timeout, envs
        self.parts: Sequence[Timed] = ()  # of a step, beside the environments

    def seconds(self) -> float:
        """Return how many seconds to wait for the current step."""
        if self._chosen is not None:
            return self._chosen
        envs = (self._of(e.clock, self._step_timeout * e.spec.num_envs) for e in self._envs)
        return max(STEP_SECONDS, *envs, *map(self._of, self.parts))

    def _of(self, part: Timed, longest: float = math.inf) -> float:
        running = part.running
        # A slow step may need as long again, unless it is beyond the step timeout: then it hangs.
        again = running if running < self._step_timeout else 0.0
        return max(min(SLOWEST_FACTOR * part.slowest, longest), again)
