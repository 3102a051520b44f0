"""What a run keeps while it lasts: metrics, as TensorBoard and as JSON lines, and messages.

A failing disk never ends a run.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from io import TextIOWrapper
from logging.handlers import MemoryHandler
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from training.terminal import attached

log = logging.getLogger("steadyrl")

HELD_BACK, NEVER = 1000, logging.CRITICAL + 1


class JsonLines:
    """A file of JSON lines that stays whole: a line that was not written fully is taken back."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)

    def cut_after(self, step: int) -> None:
        """Drop the lines of later steps, and one that was not written fully."""
        with open(self._path, "rb") as file:
            end = 0
            for line in file:
                try:
                    known = json.loads(line)["step"] <= step and line.endswith(b"\n")
                except (ValueError, KeyError, TypeError):
                    known = False
                if not known:
                    break
                end += len(line)
        os.ftruncate(self._file, end)

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


class EventFile:
    """A TensorBoard file, written directly: one record a step, no thread, no queue."""

    def __init__(self, directory: Path) -> None:
        # Two files opened within a second (after a disk error) must not share a name.
        stamp = f"{time.time():.6f}".replace(".", "")
        name = f"events.out.tfevents.{stamp}.{socket.gethostname()}.{os.getpid()}"
        self._stream = (directory / name).open("xb")
        self._records = RecordWriter(self._stream)
        self._write(Event(file_version="brain.Event:2"))

    def begin_after(self, step: int) -> None:
        """Say that what other files hold of later steps never happened."""
        self._write(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append the scalars of a step and hand them to the system."""
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._write(Event(step=step, summary=Summary(value=values)))

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
        self._stream.flush()

    def close(self) -> None:
        """Close the file; what a full disk refused before, it may refuse again."""
        self._stream.close()


class Logger:
    """Write scalars for rising steps to TensorBoard and `metrics.jsonl`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._events: EventFile | None = None
        self._lines: JsonLines | None = None
        self._last_step = -1
        self._failing = False

    def continue_after(self, step: int) -> None:
        """Go on after this step: what was written of later ones is taken back."""
        self._last_step = step
        try:
            self._lines = JsonLines(self._directory / "metrics.jsonl")
            self._lines.cut_after(step)
            self._events = EventFile(self._directory)
            self._events.begin_after(step)
        except OSError as error:
            log.warning("earlier metrics cannot be continued: %s", error.strerror or error)
            self._drop_events()

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


class _Whole(logging.Formatter):
    """The whole story, with control characters written out."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return "".join(
            c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode()
            for c in super().format(record)
        )


class _MessageFile(logging.FileHandler):
    def emit(self, record: logging.LogRecord) -> None:
        """Lose the message where the file cannot be opened: the disk is full, or its handles."""
        with suppress(OSError):
            super().emit(record)

    def _open(self) -> TextIOWrapper:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        handle = os.open(self.baseFilename, flags, 0o644)
        return os.fdopen(handle, "a", encoding="utf-8", errors="backslashreplace")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        """Stay silent: a full disk must not print a traceback for every message."""


@contextmanager
def to_file(path: Path, *, held: bool = False) -> Iterator[Callable[[], None]]:
    """Keep messages in a file, with times and the tracebacks the terminal is spared.

    If they are held back, the file is untouched until what is yielded is called.
    """
    file = _MessageFile(path, delay=True)
    file.setFormatter(_Whole())
    handler = MemoryHandler(HELD_BACK if held else 1, NEVER, file, flushOnClose=False)

    def begin() -> None:
        handler.capacity = 1
        handler.flush()

    with ExitStack() as closed:
        closed.callback(_close, file)
        closed.enter_context(attached(handler))
        yield begin


def _close(file: logging.Handler) -> None:
    with suppress(OSError):  # what a full disk refused before, it may refuse again
        file.close()
