"""Train a run in a subprocess through the command line, isolated from crashes and leaks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

from hydra.core.override_parser.types import Quote, QuotedString

from steadyrl.core.command.parent import end_with_parent
from steadyrl.core.errors import one_line
from steadyrl.core.files import read_tail
from steadyrl.envs.types import EnvironmentFailedError
from steadyrl.memory.gpu.cards import AT_ONCE, VISIBLE
from steadyrl.training.checkpoints.run_directory import SUMMARY, in_use, read_summary
from steadyrl.training.run.signals import SIGNAL_EXIT, StoppedError
from steadyrl.training.run.watcher_process import ENDING, ORPHANED

PROGRAM = Path(__file__).parents[2]  # the package, whose `__main__` is the command
PATIENCE = 120  # seconds that an orphaned run has to save and end
LONGEST_LOG = 1_000_000  # bytes of a log searched for an error
# Status by exit code; an unhandled signal gives a negative code.
STATUS = {0: "finished", 5: "diverged", 6: "in use"}
STATUS |= dict.fromkeys((SIGNAL_EXIT + number for number in ENDING), "interrupted")
UNFINISHED = "its process exited with 0, but its summary.json does not say finished"
# Of libraries with their own thread pools; `threads=auto` is at most the first.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
# Environment variable: the cards that runs see where a launcher hides them from its own processes.
CARDS, ALL_CARDS = "STEADYRL_VISIBLE_CARDS", "all"


class Outcome(NamedTuple):
    """How a run ended."""

    status: str  # as in summary.json, or `killed`, or `in use`
    exit_code: int
    score: float | None = None
    seconds: float | None = None
    error: str | None = None


def status_of(code: int) -> str:
    """Return the status that an exit code means."""
    return "killed" if code < 0 else STATUS.get(code, "failed")


def quoted(value: object) -> str:
    """Return a value quoted for Hydra's override grammar."""
    return QuotedString(str(value), Quote.single).with_quotes()


def unfinished_exit(seconds: float) -> Outcome:
    """Return the outcome of a process that exited with 0 before its run had finished."""
    code = EnvironmentFailedError.exit_code
    return Outcome("failed", code, None, seconds, UNFINISHED)


def _file_of_summary(directory: Path) -> tuple[int, int] | None:
    """Return inode and mtime of a run's summary.json, which tell it from a newer one."""
    try:
        found = (directory / SUMMARY).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def is_finished(summary: Mapping[str, Any]) -> bool:
    """Return whether a summary is of a finished run."""
    return summary.get("status") == "finished"


def forwarded(number: int) -> int:
    """Return the signal to send to a run after this one.

    Schedulers send SIGUSR2 and SIGXCPU to all processes of a job: a run that gets another one too
    would stop at once.
    """
    return number if number in (signal.SIGUSR2, signal.SIGXCPU) else signal.SIGTERM


class RunProcess:
    """Subprocess that starts or resumes the run in `directory`; it ends with its parent."""

    def __init__(
        self,
        overrides: Sequence[str],
        directory: Path,
        *,
        output: IO[bytes] | int,
        options: Sequence[str] = (),
        threads: int | None = None,
        at_once: int | None = None,
    ) -> None:
        """Start it; `at_once`: runs side by side, which divide this machine's cards.

        `threads` bounds `threads=auto` and the thread pools of libraries.
        """
        self.directory = directory
        self._begin, self._earlier = time.monotonic(), _file_of_summary(directory)
        where = [f"run_dir={quoted(directory)}", "resume=auto"]
        environment = dict(os.environ)
        if at_once is not None:
            environment[AT_ONCE] = str(at_once)
        if environment.get(CARDS) == ALL_CARDS:
            environment.pop(VISIBLE, None)
        elif CARDS in environment:
            environment[VISIBLE] = environment[CARDS]
        if threads is not None:
            environment |= dict.fromkeys(THREADS, str(threads))
        others = [text for text in overrides if text.partition("=")[0] not in ("run_dir", "resume")]
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *options, *others, *where],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C is forwarded once, by the parent
            preexec_fn=partial(end_with_parent, ORPHANED, os.getpid()),
        )

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Ask the run to save and end, after this signal."""
        if self.process.poll() is None:
            self.process.send_signal(forwarded(number))

    def wait(self, error: str | None = None) -> Outcome:
        """Wait for the run to end; return its outcome, with `error` as the reason if it failed."""
        code = self.process.wait()
        summary = read_summary(self.directory)
        # An old summary.json is from an earlier attempt; clocks of two machines may differ.
        is_new = _file_of_summary(self.directory) != self._earlier
        seconds = time.monotonic() - self._begin
        if code == 0 and not (is_new and is_finished(summary)):
            return unfinished_exit(seconds)
        score = summary.get("eval_return_mean") if is_new else None
        status = status_of(code)
        if status == "killed":
            score, error = None, f"killed by signal {-code}"
        return Outcome(status, code, score, seconds, error)


def wait_until_free(directory: Path) -> None:
    """Wait until an orphaned run has saved and ended, before it is resumed."""
    end = time.monotonic() + PATIENCE
    while in_use(directory) and time.monotonic() < end:
        time.sleep(0.5)


@contextmanager
def running(
    overrides: Sequence[str], seeds: Sequence[int], place: Path
) -> Iterator[list[RunProcess]]:
    """Train one run per seed in parallel subprocesses; on exit all save and end.

    After a signal they get the same one.
    """
    children: list[RunProcess] = []
    number: int = signal.SIGTERM
    place.mkdir(parents=True, exist_ok=True)
    try:
        with (place / "out.log").open("ab") as output:
            for seed in seeds:
                own = [*overrides, f"seed={seed}"]
                where = place / f"seed-{seed}"
                wait_until_free(where)
                to = output.fileno()
                children.append(RunProcess(own, where, output=to, threads=1, at_once=len(seeds)))
        yield children
    except StoppedError as stopped:
        number = stopped.exit_code - SIGNAL_EXIT
        raise
    finally:
        for child in children:
            child.stop(number)
        for child in children:
            child.process.wait()


def logged_error(log: Path) -> str | None:
    """Return the last error in the log of runs."""
    return last_error(read_tail(log, LONGEST_LOG).splitlines())


def last_error(lines: Sequence[str]) -> str | None:
    """Return the message of the last line that starts with `error: `."""
    messages = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return one_line(messages[-1]) if messages else None
