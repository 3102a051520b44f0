"""What memory is judged by: the bounds above the process, or the run's own memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from steadyrl.memory.bounds import Bound, Bounds, margin_of
from steadyrl.memory.monitor import Monitor
from steadyrl.memory.process import MB

NEAR = 0.85  # of the limit: warn, clean and save, once


class Level(NamedTuple):
    """How near memory is to a bound; `margin` of it is kept for saving the run."""

    bound: Bound
    margin: int
    is_own: bool = False  # `memory.limit_mb`, a number, of what the run's processes hold
    tree_is_new: bool = False  # whether the monitor's tree was read for it

    @property
    def limit(self) -> int:
        """Return the bytes that may be used."""
        return self.bound.limit - self.margin

    @property
    def free(self) -> int:
        """Return the bytes left below the limit; negative beyond it."""
        return self.limit - self.bound.used

    @property
    def is_near(self) -> bool:
        """Return whether the limit is near."""
        return self.bound.used >= NEAR * self.limit


class BoundsMeter:
    """Reads the bound that leaves least (`memory.limit_mb=auto`)."""

    def __init__(self, bounds: Bounds, swapped: Callable[[], int], saving: int | None) -> None:
        """Start; `saving`: bytes that saving the run takes; None: no margin at all."""
        self._bounds, self._swapped, self._saving = bounds, swapped, saving

    def read(self) -> Level | None:
        """Return the level of the nearest bound."""
        found = self._bounds.read(self._swapped())
        return nearest(Level(bound, self._margin(bound.limit)) for bound in found)

    confirm = read

    def _margin(self, limit: int) -> int:
        return 0 if self._saving is None else margin_of(limit, self._saving)


def nearest(levels: Iterable[Level | None]) -> Level | None:
    """Return the level that leaves least; None if there is none."""
    return min(filter(None, levels), key=lambda level: level.free, default=None)


class OwnMeter:
    """Reads what the run's processes hold (`memory.limit_mb` is a number)."""

    def __init__(self, limit_mb: float, monitor: Monitor) -> None:
        self._name, self._limit = f"memory.limit_mb={limit_mb:g}", int(limit_mb * MB)
        self._monitor = monitor

    def read(self) -> Level | None:
        """Return an estimate: the last exact reading and each heap's change since."""
        return self._level(self._monitor.kept())

    def confirm(self) -> Level | None:
        """Return the exact level; milliseconds a process."""
        return self._level(self._monitor.refresh_tree())._replace(tree_is_new=True)

    def _level(self, used: int) -> Level:
        return Level(Bound(self._name, self._limit, used, shared=False), 0, is_own=True)
