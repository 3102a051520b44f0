"""Events every so many steps, when steps arrive several at a time."""

from __future__ import annotations


class Interval:
    """Fire once for every crossing of a multiple of `every`; 0 never fires."""

    def __init__(self, every: int) -> None:
        self._every = every
        self.next = every if every else None

    def due(self, step: int) -> bool:
        """Return whether a multiple was reached since the last call; several count as one."""
        if self.next is None or step < self.next:
            return False
        self.next = (step // self._every + 1) * self._every
        return True
