"""Which of several trainers that share a memory bound ends first: the one that grew most.

Each writes a small file to a directory of this user while a bound is near. A file counts while its
process lives, so a trainer that is killed leaves nothing that others wait for.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from steadyrl.core.private_directories import make_private, temporary_folder
from steadyrl.memory.process import UNREADABLE

MINUTE = 60.0
STEP = 16_000_000  # bytes: growth that differs less is a tie, which the youngest loses


class Trainer(NamedTuple):
    """A trainer near a bound: its process, and the bytes it grew by in the last minute."""

    process: int
    started: float
    bound: str
    growth: int
    ends: bool  # it saves its run, and its memory will be free

    @property
    def order(self) -> tuple[int, float, int]:
        """The highest of all trainers ends first."""
        return max(0, self.growth) // STEP, self.started, self.process


class LastMinuteGrowth:
    """How much a process tree grew in the last minute; a younger one grew by all it holds."""

    def __init__(self, started: float) -> None:
        self._samples: deque[tuple[float, int]] = deque([(started, 0)])

    def add(self, now: float, nbytes: int) -> int:
        """Add a sample and return the growth."""
        self._samples.append((now, nbytes))
        while len(self._samples) > 2 and self._samples[1][0] <= now - MINUTE:
            self._samples.popleft()
        return nbytes - self._samples[0][1]


class Trainers:
    """This user's trainers on this machine."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = temporary_folder() / "trainers" if folder is None else folder
        self.started = time.time()
        with suppress(*UNREADABLE):
            self.started = psutil.Process().create_time()
        self._file = self._folder / f"{os.getpid()}.json"
        self._written = False

    def publish(self, bound: str, growth: int, *, ends: bool = False) -> float:
        """Publish this trainer's growth; return the part of the others' margin that it may use.

        0 if it is to end first; all of it while another one ends.
        """
        own = Trainer(os.getpid(), self.started, bound, growth, ends)
        self._write(own)
        others = [each for each in self._others() if each.bound == bound]
        if any(each.ends for each in others):
            return 1.0
        return sum(each.order > own.order for each in others) / (1 + len(others))

    def close(self) -> None:
        """Remove this trainer's file."""
        if self._written:
            with suppress(OSError):
                self._file.unlink()

    def _write(self, own: Trainer) -> None:
        if not make_private(self._folder):
            return  # alone, as far as it can be known
        partial = self._file.with_suffix(".partial")
        with suppress(OSError):
            partial.write_text(json.dumps(own))
            partial.replace(self._file)
            self._written = True

    def _others(self) -> Iterator[Trainer]:
        if not self._written:
            return
        for file in self._folder.glob("*.json"):
            if file == self._file:
                continue
            found = _read(file)
            if found is None:
                continue  # of another version
            if _lives(found):
                yield found
            else:
                with suppress(OSError):
                    file.unlink()


def _read(file: Path) -> Trainer | None:
    with suppress(OSError, ValueError, TypeError):
        process, started, bound, growth, ends = json.loads(file.read_text())
        return Trainer(int(process), float(started), str(bound), int(growth), bool(ends))
    return None


def _lives(trainer: Trainer) -> bool:
    """Return whether this process exists; a later one may have its number."""
    with suppress(*UNREADABLE):
        return abs(psutil.Process(trainer.process).create_time() - trainer.started) < 1
    return False
