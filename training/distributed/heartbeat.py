"""Signs of life: who is gone, who hangs, and why, so that no rank waits for ever for another.

Every rank's thread says once a second that it lives and looks after the next rank, so that the
work does not grow with their number. Where a rank died of something it could still say, that
stands in the store.
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from steadyrl.core.errors import one_line

FAILED = "failed"
EVERY = 0.5  # seconds between two beats
SILENT = 5.0  # seconds without one, and a rank is taken for dead
GRACE = 2.0  # seconds that a rank has to end well once another is lost
EXIT_CODE = 8


class Told(NamedTuple):
    """Which rank was lost, and why; −1: nobody knows which."""

    rank: int
    reason: str

    def __str__(self) -> str:
        who = "another rank" if self.rank < 0 else f"rank {self.rank}"
        return f"{who} is lost: {self.reason}"


class Heartbeat:
    """Beats in a thread, and ends the process where the run is over and it does not notice."""

    def __init__(
        self, store: Any, rank: int, people: Sequence[tuple[str, int]], step_timeout: float
    ) -> None:
        self._store, self._rank, self._people = store, rank, people
        self._step_timeout, self._timeouts = step_timeout, 1
        self._answers: Callable[[], int] = int  # of environments, within a row too
        self._heard = 0
        self._next = (rank + 1) % len(people)
        self._patient = 0
        self._alive = math.inf  # when the run itself gave the last sign, once it has begun
        self.lost: Told | None = None  # once that is known
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def follow(self, answers: Callable[[], int], timeouts: int) -> None:
        """Take each answer of an environment for a sign; so many timeouts may lie between two."""
        self._answers, self._timeouts = answers, timeouts

    def listen(self) -> None:
        """Beat where environments have answered since the last time."""
        before, self._heard = self._heard, self._answers()
        if self._alive < math.inf and self._heard != before:
            self.beat()

    def beat(self) -> None:
        """Say that the run goes on."""
        self._alive = time.monotonic()

    @contextmanager
    def waits(self) -> Iterator[None]:
        """Do something that may take as long as it likes: wait for others, evaluate, save."""
        self._patient += 1
        try:
            yield
        finally:
            self._patient -= 1
            if self._alive < math.inf:
                self.beat()

    def tell(self, told: Told) -> bool:
        """Leave word of what was lost; the first word stands: return whether this is it."""
        self.lost = self.lost or told
        word = json.dumps(told)
        try:
            return bool(self._store.compare_set(FAILED, "", word) == word.encode())
        except RuntimeError:  # the store went with rank 0, of which all hear
            return False

    def ask(self) -> Told | None:
        """Return what was lost, once that is known: it may take a moment."""
        end = time.monotonic() + GRACE
        while time.monotonic() < end:
            found = self._word() or self._gone()
            if found is not None:
                self.tell(found)
                return found
            time.sleep(0.05)
        return None

    def close(self) -> None:
        """Beat no more."""
        self._closed.set()
        self._thread.join()

    def _word(self) -> Told | None:
        try:
            if self._store.check([FAILED]):
                return Told(*json.loads(self._store.get(FAILED)))
        except RuntimeError:
            return Told(0, "its store does not answer") if self._rank else None
        return None

    def _gone(self) -> Told | None:
        """Return who is no longer there, of those on this machine."""
        for rank, (host, process) in enumerate(self._people):
            if host == socket.gethostname() and not _lives(process):
                return Told(rank, f"process {process} is gone, killed or out of memory")
        return None

    def _run(self) -> None:
        heard, last, count = time.monotonic(), b"", 0
        while not self._closed.wait(EVERY):
            self.listen()
            lost = self._word()
            if lost is None:
                count += 1
                with suppress(RuntimeError):
                    self._store.set(f"beat/{self._rank}", str(count))
                    if self._store.check([f"beat/{self._next}"]):
                        beat = self._store.get(f"beat/{self._next}")
                        heard, last = (heard if beat == last else time.monotonic()), beat
                lost = self._silent(time.monotonic() - heard)
            if lost is not None:
                self.tell(lost)
                if not self._closed.wait(0 if lost.rank == self._rank else GRACE):
                    self._end(lost)

    def _silent(self, silence: float) -> Told | None:
        if silence > SILENT:
            return Told(self._next, f"no sign of life for {silence:.0f} s")
        busy = time.monotonic() - self._alive
        if not self._patient and busy > self._timeouts * self._step_timeout:
            times = f"{self._timeouts} times " if self._timeouts > 1 else ""
            limit = f"{times}env.step_timeout={self._step_timeout:g} seconds"
            why = f"one row takes longer than {limit}"
            return Told(self._rank, f"{why}: an environment hangs")
        return None

    def _end(self, lost: Told) -> None:
        """End what cannot end by itself: it waits for one that will never answer."""
        if self._rank in (0, lost.rank) or (lost.rank == 0 and self._rank == 1):
            with suppress(OSError, ValueError):
                print(f"error: {one_line(str(lost))}", file=sys.stderr, flush=True)
        os._exit(EXIT_CODE)


def _lives(process: int) -> bool:
    """Return whether a process of this machine is there and no zombie."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
