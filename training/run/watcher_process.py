"""The process that `watcher.py` starts: it waits, and ends a run that cannot end itself.

Started as a file, with nothing of the project, so that it is there in milliseconds.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import socket
import struct
import sys
import time

# Numbers of 64 bits in the shared memory: the row under way, or 0; milliseconds that it may take;
# whether several processes are one run, and get signals twice; whether the run has begun.
ROW, ALLOWED, TOGETHER, BEGUN, WORDS = range(5)
QUIT = b"quit"
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SLACK = 2.0  # seconds that the run itself has to end what takes too long
AGAIN = 1.0  # seconds that a second signal leaves it
SAID = b"\nthe row under way never comes back from native code: killed; the last checkpoint stays\n"


class Stuck:
    """Whether a run is where it was when a signal came, though it had time to end."""

    def __init__(self, numbers: memoryview) -> None:
        self._numbers = numbers
        self._signals = 0
        self._where = (0, 0)
        self.deadline: float | None = None

    def signalled(self, now: float) -> None:
        """Count a signal that came to the run."""
        self._signals += 1
        if self._signals == 1:
            self._look(now)
        elif not self._numbers[TOGETHER] and self.deadline is not None:
            self.deadline = min(self.deadline, now + AGAIN + SLACK)

    def confirmed(self, now: float) -> bool:
        """Return whether it is stuck, once its time is over; if not, it has as much again."""
        before, (begun, row) = self._where, self._now()
        if (begun, row) == before and (row or not begun):
            return True
        self._look(now)
        return False

    def _look(self, now: float) -> None:
        self._where = self._now()
        self.deadline = now + self._numbers[ALLOWED] / 1000 + SLACK

    def _now(self) -> tuple[int, int]:
        return self._numbers[BEGUN], self._numbers[ROW]


def watch(channel: socket.socket, numbers: memoryview, trainer: int, process: int) -> bool:
    """Wait until the run ends by itself (False) or has to be ended (True)."""
    stuck = Stuck(numbers)
    ready = select.poll()
    ready.register(channel, select.POLLIN)
    ready.register(trainer, select.POLLIN)
    while True:
        wait = None
        if stuck.deadline is not None:
            wait = max(0.0, 1000 * (stuck.deadline - time.monotonic()))
        found = {handle for handle, _ in ready.poll(wait)}
        if trainer in found:
            return False
        if channel.fileno() in found:
            data, extra, *_ = channel.recvmsg(64, 256)
            if data in (b"", QUIT):
                return False
            # A process that the run has forked has the same end, and is not meant.
            writers = [struct.unpack("3i", content)[0] for *_, content in extra]
            if data[0] in ENDING and writers == [process]:
                stuck.signalled(time.monotonic())
        elif stuck.deadline is not None and stuck.confirmed(time.monotonic()):
            return True


def main(channel: int, shared: int, trainer: int, process: int) -> None:
    """Watch until the end."""
    for number in ENDING:  # of the run, which may come to its whole group
        signal.signal(number, signal.SIG_IGN)
    numbers = memoryview(mmap.mmap(shared, 8 * WORDS)).cast("Q")
    with socket.socket(fileno=channel) as ours:
        if watch(ours, numbers, trainer, process):
            # By its handle: the number of a process may be another's by now.
            signal.pidfd_send_signal(trainer, signal.SIGKILL)
            os.write(2, SAID)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
