"""The records of a run, the sink interface, and the simplest sink: a JSON-lines file."""

from __future__ import annotations

import json
import logging
import os
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from steadyrl.core.command.typed import command_of
from steadyrl.core.errors import show
from steadyrl.core.files import open_regular, read_lines, read_tail
from steadyrl.core.safe_parsing import from_json
from steadyrl.training.config.overrides import ABOUT_THE_RUN, flatten

log = logging.getLogger("steadyrl")

METRICS = "metrics.jsonl"
LONGEST_LINE = 1_000_000  # bytes of one line that are read at most
BUCKETS = 20  # of a histogram


class RunInfo(NamedTuple):
    """Name and configuration of a run, passed to the sinks when it starts or resumes."""

    name: str
    config: Mapping[str, Any]  # composed and resolved
    overrides: Sequence[str]  # as on the command line
    options: Sequence[str] = ()  # the same: --config-dir

    @property
    def command(self) -> str:
        """The command line of the run, as it is typed in a shell."""
        return " ".join([command_of(), *map(shlex.quote, [*self.options, *self.overrides])])

    def hparams(self) -> dict[str, bool | float | str]:
        """Return the run's hyperparameters: agent, environment, seed and overrides.

        An overridden config group or preset maps to its name, an overridden key to its final value.
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
            key: value if isinstance(value, bool | int | float) else str(show(value, whole=True))
            for key, value in found.items()
        }


class Record(NamedTuple):
    """Finite metrics of one step."""

    step: int
    wall_seconds: float
    scalars: Mapping[str, float]
    episodes: Sequence[tuple[int, float]]  # (step, return) since the last record
    returns: Sequence[float]  # of the episodes that are kept, if any is new


def histogram(values: Sequence[float]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return counts [BUCKETS] and edges [BUCKETS + 1] of values, however close or large."""
    low, high = min(values), max(values)
    least = 1e-9 * max(-low, high, 1e-9)  # 0.3 and 0.1 + 0.2 have no 20 numbers between them
    if high - low < least:
        margin = max(least, 0.5)
        low, high = low - margin, high + margin
    return np.histogram(values, BUCKETS, (low, high))


def last_logged_step(path: Path) -> float:
    """Return the step of the last whole line of a metrics file; -1 without one."""
    for line in reversed(read_tail(path, LONGEST_LINE).splitlines()):
        with suppress(ValueError, KeyError, TypeError, OverflowError):  # damaged
            return float(from_json(line.encode())["step"])
    return -1


class Sink(ABC):
    """Destination of metrics; a write that fails by `failures` is retried with the next record."""

    name: ClassVar[str] = ""  # in warnings; "": a file of the run directory
    failures: tuple[type[Exception], ...] = (OSError,)

    @abstractmethod
    def write(self, record: Record) -> None:
        """Write one record."""

    @abstractmethod
    def write_video(self, step: int, gif: bytes) -> None:
        """Write the GIF preview of an evaluation video, if the sink can show one."""

    @abstractmethod
    def continue_after(self, step: int) -> None:
        """Resume after `step`: drop records of later steps."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources; safe to call twice and after a failure."""


class JsonLines(Sink):
    """Append-only JSON-lines file; a partly written line is truncated away."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1

    def _open(self) -> int:
        if self._file < 0:
            self._file = open_regular(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        return self._file

    def write_video(self, step: int, gif: bytes) -> None:
        """Ignore it: this file holds scalars only."""

    def continue_after(self, step: int) -> None:
        """Truncate the file after the last complete line of `step` or earlier."""
        handle = self._open()
        end = 0
        for line, at in read_lines(self._path, LONGEST_LINE):
            try:
                known = from_json(line)["step"] <= step
            except (ValueError, KeyError, TypeError):
                continue  # a corrupted line: the lines after it still count
            if not known or not line.endswith(b"\n"):
                break
            end = at
        os.ftruncate(handle, end)

    def write(self, record: Record) -> None:
        """Append one line with a single write."""
        handle = self._open()
        if not os.fstat(handle).st_nlink:
            log.warning("%s was deleted while the run was writing it: it begins anew", self._path)
            self.close()
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
            raise OSError(f"only {written} of {len(line)} bytes were written")

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
