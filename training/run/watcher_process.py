"""The process that `watcher.py` starts: it kills a run that cannot end itself.

It also reports a run that crashes within a step of an environment, as the run itself cannot.

Run as a file without importing the project, so that it is ready in milliseconds.
"""

from __future__ import annotations

import math
import mmap
import os
import select
import signal
import socket
import struct
import sys
import time

# 64-bit words of the shared memory: number of the current step, or 0; milliseconds it may take;
# whether there are several ranks, which get signals twice; whether the run has begun.
STEP, ALLOWED, TOGETHER, BEGUN, WORDS = range(5)
QUIT = b"quit"
LOG = b"log "  # + path of the run's log file + NUL + the override that continues the run
LONGEST_LOG = 3 * 4096  # bytes of these: two paths, one of them quoted
# A terminal that closes sends SIGHUP; schedulers send SIGUSR2 before a time limit (Slurm's
# `--signal=USR2@60`), and the kernel SIGXCPU from a limit of processor time on.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2, signal.SIGXCPU)
# What the kernel sends to a run whose parent died (`end_with_parent`); 0: there is none. Schedulers
# signal both, so it is never a second signal.
ORPHANED = int(getattr(signal, "SIGRTMIN", 0))
STOPPING = (*ENDING, ORPHANED) if ORPHANED else ENDING
SLACK = 2.0  # more seconds, in which the run may still end by itself
AFTER_SECOND_SIGNAL = 1.0  # seconds that are left
STAYS = b"the last checkpoint stays"
KILLED = b"\nthe current step does not return from native code: killed; " + STAYS + b"\n"
ENDED = (
    b"\nerror: the process ended within a step of an environment: it crashed or called exit() in "
    b"native code, or was killed; train.log has the stack of a crash; " + STAYS + b"\n"
)


# `timeout` and many schedulers signal a process and then its group: within these seconds the same
# signal again is still the first. Two presses of Ctrl-C are further apart. The kernel sends SIGXCPU
# every second.
REPEATS = dict.fromkeys(ENDING, 1.0) | {signal.SIGINT: 0.1, signal.SIGXCPU: math.inf}


class Repeats:
    """Tells a signal that comes twice from a second one."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None
        self._orphaned = False

    def __call__(self, number: int, now: float) -> bool:
        """Return whether the first signal, with this number, came a moment ago.

        ORPHANED repeats any other one, and is repeated by it.
        """
        if number == ORPHANED:
            before = self._orphaned or self._first is not None
            self._orphaned = True
            return before
        if self._first is None:
            self._first = number, now
            return self._orphaned
        first, came = self._first
        return number == first and now - came < REPEATS[signal.Signals(number)]


class Stuck:
    """Finds out whether a run is still in the step in which a signal came, after its time limit."""

    def __init__(self, numbers: memoryview) -> None:
        self._numbers = numbers
        self.signals, self._repeats = 0, Repeats()
        self._where, self._since = (0, 0), 0.0
        self.deadline: float | None = None

    def signalled(self, number: int, now: float) -> None:
        """Count a signal to the run."""
        if self._repeats(number, now):
            return
        self.signals += 1
        if self.signals == 1:
            self._look(now)
        elif not self._numbers[TOGETHER] and self.deadline is not None:
            self.deadline = min(self.deadline, now + AFTER_SECOND_SIGNAL + SLACK)

    def confirmed(self, now: float) -> bool:
        """Return whether the run is stuck, once its time is over; if not, start a new limit."""
        later = self._since + self._numbers[ALLOWED] / 1000 + SLACK
        if self.signals == 1 and now < later:  # its handler ran, and gives the step longer
            self.deadline = later
            return False
        before, (begun, step) = self._where, self._now()
        if (begun, step) == before and (step or not begun):
            return True
        self._look(now)
        return False

    def _look(self, now: float) -> None:
        self._where, self._since = self._now(), now
        self.deadline = now + self._numbers[ALLOWED] / 1000 + SLACK

    def _now(self) -> tuple[int, int]:
        return self._numbers[BEGUN], self._numbers[STEP]


def watch(
    channel: socket.socket, numbers: memoryview, trainer: int, process: int
) -> tuple[bytes, str]:
    """Wait until the run ends, or must be killed; return the line to write, and what LOG sent."""
    stuck, sent = Stuck(numbers), ""
    ready = select.poll()
    ready.register(channel, select.POLLIN)
    ready.register(trainer, select.POLLIN)
    while True:
        wait = None
        if stuck.deadline is not None:
            wait = max(0.0, 1000 * (stuck.deadline - time.monotonic()))
        found = {handle for handle, _ in ready.poll(wait)}
        if channel.fileno() in found:
            data, extra, *_ = channel.recvmsg(len(LOG) + LONGEST_LOG, 256)
            if data == QUIT:
                return b"", sent
            if data.startswith(LOG):
                sent = os.fsdecode(data[len(LOG) :])
            # A forked process of the run writes to the same socket: not the run's signal.
            writers = [struct.unpack("3i", content)[0] for *_, content in extra]
            if data and data[0] in STOPPING and writers == [process]:
                stuck.signalled(data[0], time.monotonic())
        if trainer in found or (channel.fileno() in found and not data):
            # One that was signalled, or is one of several ranks, may end itself anywhere.
            silently = numbers[STEP] and not (stuck.signals or numbers[TOGETHER])
            return (ENDED if silently else b""), sent
        if not found and stuck.confirmed(time.monotonic()):
            return KILLED, sent


def main(channel: int, shared: int, trainer: int, process: int) -> None:
    """Watch until the run ends."""
    for number in STOPPING:  # which may be sent to the run's process group
        signal.signal(number, signal.SIG_IGN)
    numbers = memoryview(mmap.mmap(shared, 8 * WORDS)).cast("Q")
    with socket.socket(fileno=channel) as ours:
        line, sent = watch(ours, numbers, trainer, process)
    log, _, go_on = sent.partition("\0")
    if line == KILLED:
        # By pidfd: the process id may belong to another process by now.
        signal.pidfd_send_signal(trainer, signal.SIGKILL)
    if line and log:
        line = line.replace(STAYS, STAYS + os.fsencode(f": {go_on} goes on from it"))
    if line:
        os.write(2, line)
    if line and log:
        with open(log, "ab") as file:
            file.write(line[1:])


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
