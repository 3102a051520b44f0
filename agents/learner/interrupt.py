"""How learning is cut short when its run is to end: between two steps, and nothing is half done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class CutShortError(BaseException):
    """Learning stops here for now. No failure: neither compilers nor environments may catch it."""


class Stop:
    """Whether a run is to end; learning looks at it between two gradient steps.

    Among ranks nobody stops alone: a request is what this one wants until all agree.
    """

    def __init__(self) -> None:
        self.wanted = self.requested = False
        self.together = False
        self._at_once = False

    def request(self) -> None:
        """Ask for the end; also out of a signal handler."""
        self.wanted = True
        if not self.together:
            self.agree()

    def agree(self) -> None:
        """Let everything end here, as all ranks do."""
        self.requested = True
        if self._at_once and not self.together:
            raise CutShortError

    def check(self) -> None:
        """Raise CutShortError if the end was asked for."""
        if self.requested:
            raise CutShortError

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Let a request raise CutShortError amid something long that changes nothing."""
        self._at_once = True
        try:
            self.check()
            yield
        finally:
            self._at_once = False
