"""What a run reports, and the interface of whatever keeps it: JSON lines are the simplest."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from steadyrl.core.files import open_regular, read_lines
from steadyrl.core.safe_parsing import from_json
from steadyrl.training.config.overrides import ABOUT_THE_RUN, flatten
from steadyrl.training.config.schema import show

LONGEST_LINE = 1_000_000  # bytes that are looked at


class RunInfo(NamedTuple):
    """What a run is: told to sinks once, when it begins or goes on."""

    name: str
    config: Mapping[str, Any]  # composed and resolved
    overrides: Sequence[str]  # as typed

    @property
    def command(self) -> str:
        """What was typed."""
        return " ".join(["python train.py", *self.overrides])

    def chosen(self) -> dict[str, bool | float | str]:
        """Return what tells the run from others: its agent, environment, seed and what was typed.

        A typed group or preset goes by its name, a typed key by the value it came to.
        """
        values = dict(flatten(self.config))
        found: dict[str, Any] = {
            key: values[key] for key in ("agent.name", "env.id", "seed") if key in values
        }
        for override in self.overrides:
            name, _, value = override.lstrip("+").partition("=")
            if name not in (*ABOUT_THE_RUN, "agent") and not name.startswith("~"):
                found[name] = values.get(name, value)
        return {
            key: value if isinstance(value, bool | int | float) else str(show(value))
            for key, value in found.items()
        }


class Record(NamedTuple):
    """What is reported at one step, in finite numbers."""

    step: int
    wall_seconds: float
    scalars: Mapping[str, float]
    episodes: Sequence[tuple[int, float]] = ()  # step and return of the newest, since the last one
    returns: Sequence[float] = ()  # of the last 100 episodes, where there are new ones


class Sink(ABC):
    """Keeps records of rising steps; what it fails by is a warning, and the next one is tried."""

    failures: tuple[type[Exception], ...] = (OSError,)

    @abstractmethod
    def write(self, record: Record) -> None:
        """Keep a record."""

    @abstractmethod
    def film(self, step: int, gif: bytes) -> None:
        """Show the beginning of an episode, where there is something to show it on."""

    @abstractmethod
    def continue_after(self, step: int) -> None:
        """Go on after this step: what was kept of later ones is taken back."""

    @abstractmethod
    def close(self) -> None:
        """Free everything; safe to call twice and after a failure."""


class JsonLines(Sink):
    """A file of JSON lines that stays whole: a line that was not written fully is taken back."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1

    def _open(self) -> int:
        if self._file < 0:
            self._file = open_regular(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        return self._file

    def film(self, step: int, gif: bytes) -> None:
        """Leave it out: these are numbers."""

    def continue_after(self, step: int) -> None:
        """Drop the lines of later steps, and what ends in none: it was not written fully."""
        handle = self._open()
        end = 0
        for line, at in read_lines(self._path, LONGEST_LINE):
            try:
                known = from_json(line)["step"] <= step
            except (ValueError, KeyError, TypeError):
                continue  # one that was damaged since: those after it are still what happened
            if not known or not line.endswith(b"\n"):
                break
            end = at
        os.ftruncate(handle, end)

    def write(self, record: Record) -> None:
        """Append one line with a single write."""
        handle = self._open()
        seconds = round(record.wall_seconds, 3)
        values = {"step": record.step, "wall_seconds": seconds, **record.scalars}
        line = (json.dumps(values, allow_nan=False) + "\n").encode()
        size = os.fstat(handle).st_size
        try:
            written = os.write(handle, line)
        except OSError:
            os.ftruncate(handle, size)
            raise
        if written < len(line):
            os.ftruncate(handle, size)
            raise OSError(f"only {written} of {len(line)} bytes fitted")

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
