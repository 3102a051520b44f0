"""Interrupting learning between two gradient steps when a run is to end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Interrupted(BaseException):
    """Learning stops here; a BaseException, so that no `except Exception` catches it."""


class Stop:
    """The stop flag of a run, read between two gradient steps.

    `local` is this process's own request, `confirmed` the decision to stop. With several ranks a
    request is confirmed only once all ranks have agreed on it.
    """

    def __init__(self) -> None:
        self.local = self.confirmed = False
        self.multi_rank = False
        self._interruptible = False

    def request(self) -> None:
        """Request the stop; safe in a signal handler."""
        self.local = True
        if not self.multi_rank:
            self.commit()

    def commit(self) -> None:
        """Confirm the stop: all ranks stop here."""
        self.confirmed = True
        if self._interruptible and not self.multi_rank:
            raise Interrupted

    def check(self) -> None:
        """Raise Interrupted if the stop is confirmed."""
        if self.confirmed:
            raise Interrupted

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let a request raise Interrupted immediately in this block, which must change nothing."""
        self._interruptible = True
        try:
            self.check()
            yield
        finally:
            self._interruptible = False
