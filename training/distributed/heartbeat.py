"""Heartbeats: find dead or hanging ranks, so that no rank waits for another for ever.

Each rank writes a heartbeat every 0.5 s and monitors the next rank, so the cost per rank is
constant. A rank that fails with an error publishes its reason in the store.
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

import psutil

from steadyrl.core.errors import one_line

FAILED = "failed"
EVERY = 0.5  # seconds between two heartbeats
SILENT = 5.0  # seconds without a heartbeat until a rank counts as dead
GRACE = 2.0  # seconds that a rank has to end cleanly once another is lost
REPORTING = 30.0  # seconds that a failing rank has to report its error and end
EXIT_CODE = 8
HOLDING = 600.0  # the same while its process on this machine runs
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


class LostRank(NamedTuple):
    """Which rank was lost, and why; rank −1: unknown."""

    rank: int
    reason: str

    def __str__(self) -> str:
        who = "another rank" if self.rank < 0 else f"rank {self.rank}"
        return f"{who} is lost: {self.reason}"


class Heartbeat:
    """Heartbeat thread; ends the process if another rank is lost and the main thread hangs."""

    def __init__(
        self, store: Any, rank: int, peers: Sequence[tuple[str, int]], step_timeout: float
    ) -> None:
        self._store, self._rank, self._peers = store, rank, peers
        self._step_timeout, self._timeouts = step_timeout, 1
        # Counts environments' responses, also within a step.
        self._env_responses: Callable[[], int] = int
        self._last_responses = 0
        self._next = (rank + 1) % len(peers)
        self._suspensions = 0
        self._last_progress = math.inf  # time of the main thread's; inf before the first
        self._woken = time.monotonic()  # when the heartbeat thread last was
        self.lost: LostRank | None = None  # set once known
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def watch_envs(self, env_responses: Callable[[], int], timeouts: int) -> None:
        """Count environment responses as progress; up to `timeouts` step timeouts without one."""
        self._env_responses, self._timeouts = env_responses, timeouts

    def poll_envs(self) -> None:
        """Register progress if environments have responded since the last call."""
        before, self._last_responses = self._last_responses, self._env_responses()
        if self._last_progress < math.inf and self._last_responses != before:
            self.beat()

    def beat(self) -> None:
        """Register progress of the main thread."""
        self._last_progress = time.monotonic()

    def end_steps(self) -> None:
        """Stop counting: no step follows, and a store or a tracker may take longer."""
        self._last_progress = math.inf

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Suspend the step timeout during an operation of any length (wait, evaluate, save)."""
        self._suspensions += 1
        try:
            yield
        finally:
            self._suspensions -= 1
            if self._last_progress < math.inf:
                self.beat()

    def publish(self, lost: LostRank) -> bool:
        """Publish the lost rank; only the first counts: return whether this is the first."""
        self.lost = self.lost or lost
        word = json.dumps(lost)
        try:
            return bool(self._store.compare_set(FAILED, "", word) == word.encode())
        except RuntimeError:  # rank 0, which runs the store, is gone: all ranks notice
            return False

    def find_lost_rank(self) -> LostRank | None:
        """Return the lost rank; wait up to `GRACE` seconds until it is known."""
        end = time.monotonic() + GRACE
        while time.monotonic() < end:
            found = self._read_lost_rank() or self._find_dead_peer()
            if found is not None:
                self.publish(found)
                return found
            time.sleep(0.05)
        return None

    def close(self) -> None:
        """Stop the heartbeat thread."""
        self._closed.set()
        self._thread.join()

    def _read_lost_rank(self) -> LostRank | None:
        try:
            if self._store.check([FAILED]):
                return LostRank(*json.loads(self._store.get(FAILED)))
        except RuntimeError:
            return LostRank(0, "its store does not answer") if self._rank else None
        return None

    def _find_dead_peer(self) -> LostRank | None:
        """Return a rank whose process on this machine has died."""
        for rank, (host, process) in enumerate(self._peers):
            if host == socket.gethostname() and not _is_running(process):
                return LostRank(rank, f"process {process} is gone, killed or out of memory")
        return None

    def _run(self) -> None:
        heard, last, count = time.monotonic(), b"", 0
        while not self._closed.wait(EVERY):
            self.poll_envs()
            if self._was_stopped():
                heard = time.monotonic()
            lost, hangs = self._read_lost_rank(), False
            if lost is None:
                count += 1
                with suppress(RuntimeError):
                    self._store.set(f"beat/{self._rank}", str(count))
                    if self._store.check([f"beat/{self._next}"]):
                        beat = self._store.get(f"beat/{self._next}")
                        heard, last = (heard if beat == last else time.monotonic()), beat
                lost = self._find_timeout(time.monotonic() - heard)
                hangs = lost is not None and lost.rank == self._rank
            if lost is not None:
                self.publish(lost)
                seconds = REPORTING if lost.rank == self._rank else GRACE
                if not self._closed.wait(0 if hangs else seconds):
                    self._end(lost)

    def _was_stopped(self) -> bool:
        """Return whether this process was, and perhaps all ranks: time then passed for nobody."""
        before, self._woken = self._woken, time.monotonic()
        stopped = self._woken - before > SILENT / 2
        if stopped and self._last_progress < math.inf:
            self.beat()
        return stopped

    def _find_timeout(self, silence: float) -> LostRank | None:
        longest = self._timeouts * self._step_timeout
        # A process that runs without a heartbeat is in native code that holds the GIL.
        if silence > SILENT and (silence > min(longest, HOLDING) or not self._next_is_running()):
            return LostRank(self._next, f"no sign of life for {silence:.0f} s")
        busy = time.monotonic() - self._last_progress
        if not self._suspensions and busy > longest:
            times = f"{self._timeouts} times " if self._timeouts > 1 else ""
            limit = f"{times}env.step_timeout={self._step_timeout:g} seconds"
            why = f"a step took longer than {limit}"
            return LostRank(self._rank, f"{why}; an environment hangs")
        return None

    def _next_is_running(self) -> bool:
        """Return whether the next rank's process is on this machine, alive and not stopped."""
        host, process = self._peers[self._next]
        return host == socket.gethostname() and _is_running(process, *STOPPED)

    def _end(self, lost: LostRank) -> None:
        """End the process: its main thread waits for a rank that will never answer."""
        if self._rank in (0, lost.rank) or (lost.rank == 0 and self._rank == 1):
            with suppress(OSError, ValueError):
                print(f"error: {one_line(str(lost))}", file=sys.stderr, flush=True)
        os._exit(EXIT_CODE)


def _is_running(process: int, *excluded: str) -> bool:
    """Return whether a process of this machine runs, is no zombie and has none of these states."""
    ended = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    try:
        return psutil.Process(process).status() not in (*ended, *excluded)
    except psutil.NoSuchProcess:
        return False
