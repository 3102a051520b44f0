"""Run one job of a sweep, in this process or as a subprocess."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from steadyrl.core.command.parent import end_with_parent
from steadyrl.core.command.typed import command_of
from steadyrl.core.errors import ExpectedError, error_lines, printable
from steadyrl.training.checkpoints.run_directory import (
    RunDirectoryInUseError,
    absolute,
    read_summary,
)
from steadyrl.training.config.overrides import preset_options
from steadyrl.training.logging.terminal import accept_all_text
from steadyrl.training.run.signals import SIGNAL_EXIT, is_ignored
from steadyrl.training.run.watcher_process import ENDING
from steadyrl.training.sweeps.jobs import SweepDirectory, SweepJob
from steadyrl.training.sweeps.subprocess_run import (
    Outcome,
    RunProcess,
    last_error,
    status_of,
    unfinished_exit,
)

log = logging.getLogger("steadyrl")

# Environment variables that a launcher passes to its workers; Hydra sets NAME per job.
NAME = "STEADYRL_SWEEP_JOB"
STOP = "STEADYRL_SWEEP_STOP"  # path of a file; once it exists, no job is started
OWNER = "STEADYRL_SWEEP_OWNER"  # pid of the sweep, if its workers end with it
THREADS = "STEADYRL_SWEEP_THREADS"  # of each job, where jobs run side by side on this machine


def say(text: str) -> None:
    """Print `text` in one write, so that lines of several processes do not mix."""
    if sys.stdout is None:  # stdout is closed
        return
    if hasattr(sys.stdout, "rich_proxied_file"):  # a live line is shown; the log prints above it
        log.info(text)
        return
    accept_all_text(sys.stdout)
    with suppress(OSError):  # the reader is gone: jobs continue
        sys.stdout.write(f"{printable(text)}\n")
        sys.stdout.flush()


class UnfinishedError(ExpectedError):
    """Some jobs did not finish; exits with the code of the first."""

    def __init__(self, jobs: Sequence[SweepJob], total: int) -> None:
        first = jobs[0]
        why = first.error or f"is {first.status}"
        super().__init__(
            f"{len(jobs)} of {total} jobs did not finish; the first, {first.label}: {why}"
        )
        # A job still run by another sweep counts as in use; a killed one has a negative code.
        code = first.exit_code or RunDirectoryInUseError.exit_code
        self.exit_code = code if code > 0 else SIGNAL_EXIT - code


def validate_finished(jobs: Sequence[SweepJob]) -> None:
    """Raise UnfinishedError unless all jobs have finished."""
    unfinished = [job for job in jobs if job.status != "finished"]
    if unfinished:
        raise UnfinishedError(unfinished, len(jobs))


def report_end(
    summary: str,
    jobs: Sequence[SweepJob],
    *,
    resume: Sequence[str],
    files: str,
    directory: Path,
    hydra: Any,
) -> None:
    """Print the end of a sweep or of many seeds: summary, directories, command to resume.

    `resume` are the arguments that continue what has not finished of `jobs`, with the folder of
    presets that `hydra`, its part of the configuration, names.
    """
    say(f"\n{summary}")
    say(files)
    events = any(directory.rglob("events.out.tfevents.*"))  # none with log.tensorboard=false
    program = "tensorboard --logdir" if events else command_of("plot")
    say(f"curves: {program} {shlex.quote(str(directory))}")
    if any(job.status != "finished" for job in jobs):  # last, because it is what to type next
        own = preset_options(hydra.runtime.config_sources)
        say(f"resume: {command_of()} {shlex.join([*own, *resume])}")


def current(sweep_dir: str) -> tuple[SweepDirectory, SweepJob] | None:
    """Return the sweep and job that this process was started for; None if there is none."""
    name = os.environ.get(NAME)
    if name is None:
        return None
    place = SweepDirectory(absolute(Path(sweep_dir), "hydra.sweep.dir"))
    job = place.read(name)
    return None if job is None else (place, job)


def run_job(
    place: SweepDirectory, job: SweepJob, in_process: Callable[[], float | None], options: list[str]
) -> float | None:
    """Run a job of a sweep in this process or a subprocess, and record its outcome.

    A failed job is recorded and printed, not raised, so that the other jobs still run.
    """
    stop = os.environ.get(STOP)
    if stop is not None and (Path(stop).exists() or not _ends_with_sweep()):
        return None
    with place.locked(job) as free:
        if not free:
            say(f"job {job.place}: {job.label}: skipped, another sweep is running it")
            return None
        say(f"job {job.place}: {job.label}")
        job.status, job.error, job.score, job.host = "running", None, None, socket.gethostname()
        job.pid = job.runner = os.getpid()
        job.stop = stop
        job.exit_code, job.seconds = None, None
        place.write(job)
        begin = time.monotonic()
        outcome = Outcome("failed", 1, None, None, "ended without an error message")
        try:
            outcome = (
                _in_process(in_process) if stop is None else _in_subprocess(place, job, options)
            )
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
            outcome = Outcome(status_of(code), code) if code else unfinished_exit(0.0)
            if not code:
                say(f"error: {outcome.error}")
                return None  # the sweep must not end as if it had finished
            raise
        except KeyboardInterrupt as error:
            outcome = Outcome("interrupted", getattr(error, "exit_code", 130))
            raise
        finally:
            job.status, job.exit_code, job.score, _, job.error = outcome
            # A resumed run's own seconds include those before.
            trained = read_summary(Path(job.run_dir)).get("wall_seconds") or 0.0
            job.seconds, job.pid = max(time.monotonic() - begin, trained), None
            if job.status == "in use":
                job.status, job.error = "failed", "another run uses its directory"
            place.write(job)
    if stop is not None and not _ends_with_sweep():
        os._exit(SIGNAL_EXIT + signal.SIGTERM)  # the sweep is gone: nobody reads the score
    return job.score


def _in_process(train: Callable[[], float | None]) -> Outcome:
    try:
        return Outcome("finished", 0, train())
    except ExpectedError as error:
        say("\n".join(error_lines(error)))
        line = error.line
        return Outcome(status_of(error.exit_code), error.exit_code, error=line)


def _in_subprocess(place: SweepDirectory, job: SweepJob, options: list[str]) -> Outcome:
    threads = os.environ.get(THREADS)
    child = RunProcess(
        job.overrides,
        Path(job.run_dir),
        output=subprocess.PIPE,
        options=options,
        threads=None if threads is None else int(threads),
    )
    job.pid = child.process.pid
    place.write(job)
    errors: list[str] = []
    assert child.process.stdout is not None
    with _stopping_child(child):
        for raw in child.process.stdout:
            line = raw.decode(errors="replace").rstrip("\n")
            errors = [line] if line.startswith("error: ") else errors
            say(f"[{job.place} {job.label}] {line}")
        return child.wait(last_error(errors))


def _ends_with_sweep() -> bool:
    """Register for SIGTERM when the sweep's process dies; return False if it has died already.

    Otherwise joblib's workers, and the runs they wait for, would outlive a killed sweep.
    """
    owner = os.environ.get(OWNER)
    if owner is None or owner == str(os.getpid()):
        return True
    return end_with_parent(signal.SIGTERM, int(owner))


@contextmanager
def _stopping_child(child: RunProcess) -> Iterator[None]:
    """Forward signals to the child and wait for it, then call the previous handler.

    Slurm sends SIGTERM or SIGUSR2 before preemption, and submitit's handler then requeues the job;
    a terminal that closes sends SIGHUP.
    """
    # With a launcher that runs jobs in the sweep's own process, the sweep forwards signals.
    own = os.environ.get(OWNER) == str(os.getpid())
    if own or threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [number for number in ENDING if number != signal.SIGINT and not is_ignored(number)]
    before: dict[int, Any] = {number: signal.getsignal(number) for number in numbers}

    def act(number: int, frame: Any) -> None:
        child.stop(number)
        with suppress(subprocess.TimeoutExpired):
            child.process.wait(timeout=60)
        handler = before[number]
        if callable(handler):
            handler(number, frame)

    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launching process forwards it
    for number in before:
        signal.signal(number, act)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, interrupt)
        for number, handler in before.items():
            signal.signal(number, handler)
