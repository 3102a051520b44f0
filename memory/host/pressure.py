"""Swap and memory pressure: the run is slower and larger than its resident memory shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from steadyrl.memory.bounds import control_groups
from steadyrl.memory.leak import DoublingAlarm
from steadyrl.memory.process import MB, PROC, readable

_LEAST_SWAP = 32 * MB  # below, pages that nobody needs have been moved out
_LEAST_PERCENT = 10.0  # of the time

_ADVICE = "give the run more memory, or lower agent.replay.capacity or env.num_envs"


class Pressure:
    """Warns of swapped pages and of time spent waiting for memory; again when they doubled."""

    def __init__(self, proc: Path = PROC) -> None:
        self._file = _pressure_file(proc)
        self._swap, self._waiting = DoublingAlarm(), DoublingAlarm()

    def warnings(self, swapped: int) -> Iterator[str]:
        """Yield warnings; `swapped`: bytes of the run's processes in swap. Takes microseconds."""
        if swapped >= _LEAST_SWAP and self._swap.should_warn(swapped):
            yield (
                f"{readable(swapped)} of this run are in swap, which memory/rss_mb and "
                f"memory/tree_pss_mb leave out: it is slower, and no smaller. {_ADVICE}"
            )
        percent = self.percent()
        if percent >= _LEAST_PERCENT and self._waiting.should_warn(percent):
            yield (
                f"all processes waited for memory {percent:.0f} % of the last 10 seconds "
                f"({self._file}): {_ADVICE}"
            )

    def percent(self) -> float:
        """Return `full avg10`: the percentage of 10 seconds in which every task waited."""
        if self._file is not None:
            with suppress(OSError, ValueError):
                for line in self._file.read_text().splitlines():
                    kind, average, *_ = line.split()  # full avg10=0.00 avg60=0.00 …
                    if kind == "full":
                        return float(average.removeprefix("avg10="))
        return 0.0


def _pressure_file(proc: Path) -> Path | None:
    """Return the file of the nearest control group that has one, else the machine's."""
    groups = (group.directory / "memory.pressure" for group in control_groups(proc))
    for path in (*groups, proc / "pressure/memory"):
        with suppress(OSError):  # it may exist where the kernel was started without it
            path.read_text()
            return path
    return None
