"""How long a row may still take once a signal asks the run to end: longer where rows are slow."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from steadyrl.agents.learner.interrupt import CutShortError, Stop
from steadyrl.envs.vector import VectorEnv
from steadyrl.training.config.settings import RunSettings

# A terminal that closes (SIGHUP) ends a run like the others, unless nohup has it ignored.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

SIGNAL_EXIT = 128  # what a shell adds to the number of the signal that ended a process

ROW_SECONDS = 3.5  # that a row may still take, where rows are quick

RANKS_SECONDS = 20.0  # the same where ranks have to agree; torchrun kills after 30

LAST_SECONDS = 0.8  # for closing, once nothing is waited for any more

# Python cannot pass an exception on out of a weak reference's callback: it is raised again.
AGAIN_SECONDS = 0.02


class StoppedError(KeyboardInterrupt):
    """The process was asked to end at once."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = SIGNAL_EXIT + number


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let a signal end the whole process without a traceback, with the code of that signal."""
    _handle(_stop_at_once)
    _handle(_nothing_to_save, (signal.SIGUSR1,))
    sys.unraisablehook = _leave_if_stopped
    try:
        yield
    except KeyboardInterrupt as error:
        _leave(getattr(error, "exit_code", SIGNAL_EXIT + signal.SIGINT))
    except (ImportError, MemoryError, OSError) as error:
        from steadyrl.core.errors import exit_with, is_out_of_memory, no_room_to_start

        if not is_out_of_memory(error):
            raise
        exit_with(no_room_to_start(error))
    except SystemExit as ended:
        from steadyrl.training.run.rank_info import rank_info  # loads more than this module may

        code = ended.code
        # A rank that fails leaves connections behind on which the interpreter would stumble.
        if isinstance(code, int) and (code > SIGNAL_EXIT or (code and rank_info().size > 1)):
            _leave(code)
        raise
    finally:
        # The interpreter takes its time to end; nobody wants a traceback of that.
        _handle(_exit)


def _leave_if_stopped(lost: Any) -> None:
    """End the process where an exception that should have done so could not be passed on."""
    if isinstance(lost.exc_value, StoppedError):
        _leave(lost.exc_value.exit_code)
    sys.__unraisablehook__(lost)


def _leave(code: int) -> NoReturn:
    """End the process without waiting for compilers and the like, which may take seconds."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # whoever reads it may be gone
            stream.flush()
    os._exit(code)


class StopSignals:
    """Once a run has begun, the first signal is noted; a second one ends it at once.

    A row that is not over in time, because an environment hangs, counts as a second signal; how
    long that is, `patience` says.
    """

    def __init__(self) -> None:
        self._noted: int | None = None
        self.save_requested = False  # by SIGUSR1; whoever saves takes it back
        self.stop = Stop()  # what learning obeys
        self.patience: Callable[[], float] = lambda: ROW_SECONDS  # that a row may still take
        self.saving = False  # no row is under way but a disk is, which takes as long as it takes
        self._overdue = False
        self._waiting: int | None = None
        self._begun = self._shielded = self._again = False
        self._before: dict[int, Any] = {}
        self._unraisable = sys.unraisablehook

    @property
    def received(self) -> int | None:
        """The signal that ends the run; among ranks, once all have agreed to end."""
        if not self.stop.requested:
            return None
        return self._noted or signal.SIGTERM  # which only another rank received

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

    def reached(self) -> None:
        """Say that the row under way is over: from now on only a second signal ends the run."""
        if self._noted is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def __enter__(self) -> StopSignals:
        self._before = _handle(self._receive)
        self._before |= _handle(self._save, (signal.SIGUSR1,))
        self._before |= _handle(self._hurry, (signal.SIGALRM,))
        self._unraisable, sys.unraisablehook = sys.unraisablehook, self._pass_on
        return self

    def __exit__(self, *_: object) -> None:
        self.reached()
        sys.unraisablehook = self._unraisable
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int) -> None:
        if not self._begun:
            _stop_at_once(number)
        elif self._noted is None:
            self._noted = number
            if not self.stop.together:
                _say("stopping after this row; again to stop now")
            self._wait()
            self.stop.request()
        elif self.stop.together:
            pass  # from the launcher once more, which got it too
        elif self._shielded:
            self._waiting = number
        else:
            signal.setitimer(signal.ITIMER_REAL, LAST_SECONDS)
            self._overdue = True
            raise StoppedError(number)

    def longest(self) -> float:
        """Return the seconds that the row under way is given once a signal came."""
        seconds = self.patience()
        return max(RANKS_SECONDS, seconds) if self.stop.together else seconds

    def _wait(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, self.longest())

    def _save(self, number: int) -> None:
        if self._begun:
            self.save_requested = True
            _say("saving after this row")

    def _pass_on(self, lost: Any) -> None:
        if isinstance(lost.exc_value, CutShortError) and self._noted is not None:
            self._again = True
            signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)
        else:
            self._unraisable(lost)

    def _hurry(self, number: int) -> None:
        """End what takes too long: first by an exception, then whatever it does."""
        assert self._noted is not None
        if self._again:
            self._again = False
            self._wait()
            self.stop.request()
            return
        if self.saving and not self._overdue:
            self._wait()
            return
        if self._overdue:
            os._exit(SIGNAL_EXIT + self._noted)
        self._overdue = True
        signal.setitimer(signal.ITIMER_REAL, LAST_SECONDS)
        _say("the row under way takes too long: stopping without it")
        raise StoppedError(self._noted)


def _stop_at_once(number: int) -> None:
    _say("stopping")
    raise StoppedError(number)


def _nothing_to_save(number: int) -> None:
    del number


def _exit(number: int) -> None:
    os._exit(SIGNAL_EXIT + number)


def _handle(action: Callable[[int], None], numbers: Iterable[int] = SIGNALS) -> dict[int, Any]:
    """Let signals lead to `action` in this process; return the handlers there were."""
    if threading.current_thread() is not threading.main_thread():
        return {}  # a launcher that runs jobs in threads stops them by its own means
    owner = os.getpid()

    def act(number: int, frame: FrameType | None) -> None:
        # A process forked from this one has these handlers too at first, and no run to stop.
        if os.getpid() == owner:
            action(number)

    before: dict[int, Any] = {
        number: signal.getsignal(number) for number in numbers if not is_ignored(number)
    }
    for number in before:
        signal.signal(number, act)
    return before


def is_ignored(number: int) -> bool:
    """Tell whether a closed terminal is to end nothing, as `nohup` has it."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def _say(line: str) -> None:
    """Write a line as a signal handler may: print could be in the middle of one already."""
    with suppress(OSError):
        begin = "\n" if os.isatty(2) else ""  # a progress bar may be on the line
        os.write(2, f"{begin}{line}\n".encode())


TIMES = 2.0  # of the slowest row so far, because rows differ


class Patience:
    """Goes by the slowest row so far, or by what one under way has taken, and the step timeout."""

    def __init__(self, settings: RunSettings, envs: Sequence[VectorEnv]) -> None:
        chosen = settings.stop_timeout
        self._chosen = None if chosen == "auto" else chosen
        self._step_timeout, self._envs = settings.env.step_timeout, envs

    def seconds(self) -> float:
        """Return how long the run should wait for the row under way."""
        if self._chosen is not None:
            return self._chosen
        return max(ROW_SECONDS, *(self._of(env) for env in self._envs))

    def _of(self, env: VectorEnv) -> float:
        expected = min(TIMES * env.clock.slowest, self._step_timeout * env.spec.num_envs)
        running = env.clock.running
        # A first step of a minute may have half a minute left; one that takes an hour hangs.
        return max(expected, running if running < self._step_timeout else 0.0)
