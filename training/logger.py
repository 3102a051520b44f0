"""Metrics on disk: TensorBoard and one JSON line per step; a failing disk never ends a run."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from training.tensorboard import EventFile

log = logging.getLogger("steadyrl")


class JsonLines:
    """A file of JSON lines that stays whole: a line that was not written fully is taken back."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)

    def append(self, record: Mapping[str, object]) -> None:
        """Append one line with a single write."""
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        size = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, line)
        except OSError:
            os.ftruncate(self._file, size)
            raise
        if written < len(line):
            os.ftruncate(self._file, size)
            raise OSError(f"only {written} of {len(line)} bytes fitted")

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class Logger:
    """Write scalars for rising steps to TensorBoard and `metrics.jsonl`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._events: EventFile | None = None
        self._lines: JsonLines | None = None
        self._last_step = -1
        self._failing = False

    def write(self, step: int, scalars: Mapping[str, float], wall_seconds: float) -> None:
        """Write the finite ones of `scalars`; on a disk error warn once and try again next time."""
        if step <= self._last_step:
            raise ValueError(f"step {step} was logged after step {self._last_step}")
        self._last_step = step
        finite = {tag: value for tag, value in scalars.items() if math.isfinite(value)}
        try:
            if self._lines is None:
                self._lines = JsonLines(self._directory / "metrics.jsonl")
            self._lines.append({"step": step, "wall_seconds": round(wall_seconds, 3), **finite})
            if self._events is None:
                self._events = EventFile(self._directory)
            self._events.write(step, finite)
        except OSError as error:
            self._drop_events()
            if not self._failing:
                log.warning(
                    "metrics cannot be written (%s): training goes on, they are lost until the "
                    "disk recovers",
                    error.strerror or error,
                )
            self._failing = True
        else:
            if self._failing:
                log.info("metrics are written again")
            self._failing = False

    def _drop_events(self) -> None:
        # A record cut short would hide everything after it: go on in a new file.
        if self._events is not None:
            with suppress(OSError):
                self._events.close()
            self._events = None

    def close(self) -> None:
        """Close both files."""
        self._drop_events()
        if self._lines is not None:
            self._lines.close()
            self._lines = None
