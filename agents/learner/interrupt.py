"""How learning is cut short when its run is to end: between two steps, and nothing is half done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Interrupted(BaseException):
    """Learning stops here for now. No failure: neither compilers nor environments may catch it."""


class Stop:
    """Whether a run is to end; learning looks at it between two gradient steps.

    Among ranks nobody stops alone: a request is what this one wants until all agree.
    """

    def __init__(self) -> None:
        self.local = self.confirmed = False
        self.multi_rank = False
        self._interruptible = False

    def request(self) -> None:
        """Ask for the end; also out of a signal handler."""
        self.local = True
        if not self.multi_rank:
            self.commit()

    def commit(self) -> None:
        """Let everything end here, as all ranks do."""
        self.confirmed = True
        if self._interruptible and not self.multi_rank:
            raise Interrupted

    def check(self) -> None:
        """Raise CutShortError if the end was asked for."""
        if self.confirmed:
            raise Interrupted

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let a request raise CutShortError amid something long that changes nothing."""
        self._interruptible = True
        try:
            self.check()
            yield
        finally:
            self._interruptible = False
