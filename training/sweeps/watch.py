"""Show progress and forward signals while jobs run in other processes."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from steadyrl.core.errors import ExpectedError
from steadyrl.training.run.signals import StoppedError, is_ignored
from steadyrl.training.run.watcher_process import ENDING, Repeats
from steadyrl.training.sweeps.job_run import say
from steadyrl.training.sweeps.jobs import SweepDirectory
from steadyrl.training.sweeps.progress import progress_line
from steadyrl.training.sweeps.subprocess_run import forwarded

WATCHED_EVERY = 1.0  # seconds


@contextmanager
def forward_signals(
    place: SweepDirectory, names: Sequence[str], stop: Path, *, detached: bool = False
) -> Iterator[list[int]]:
    """Forward the first signal to the running jobs, which save and end; start no more jobs.

    `detached`: jobs outlive this command, which ends at the first signal and leaves them alone.
    """
    received: list[int] = []
    repeats = Repeats()
    owner = os.getpid()

    def act(number: int, frame: Any) -> None:
        del frame
        if os.getpid() != owner:
            return
        if repeats(number, time.monotonic()):
            return  # to the process and to its group
        if detached:
            say("the jobs of Slurm go on; scancel ends them")
        if detached or received:
            raise StoppedError(number)
        received.append(number)
        stop.touch()
        say("stopping: running jobs save and end; signal again to stop at once")
        for job in place.named(names):
            begun = job.status == "running" and job.pid not in (None, owner)
            # Not those of another sweep in this directory.
            if begun and job.stop == str(stop) and job.host == socket.gethostname():
                assert job.pid is not None
                with suppress(OSError):
                    os.kill(job.pid, forwarded(number))

    heard = [number for number in ENDING if not is_ignored(number)]
    before = {number: signal.signal(number, act) for number in heard}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def show_progress(place: SweepDirectory, names: Sequence[str], at_once: int) -> Iterator[None]:
    """Print the sweep's progress whenever a job starts or ends."""
    over = threading.Event()

    def watch() -> None:
        shown = ""
        while not over.wait(WATCHED_EVERY):
            with suppress(ExpectedError, OSError):
                jobs = place.named(names)
                states = " ".join(job.status for job in jobs)
                if states != shown:
                    say(progress_line(jobs, at_once))
                    shown = states

    thread = threading.Thread(target=watch, name="sweep", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
