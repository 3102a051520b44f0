"""What a run keeps while it lasts: metrics, handed to all sinks, and messages.

A failing disk never ends a run.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from io import TextIOWrapper
from logging.handlers import MemoryHandler
from pathlib import Path

from steadyrl.core.errors import one_line
from steadyrl.core.files import open_regular
from steadyrl.training.logging.sinks import JsonLines, Record, RunInfo, Sink
from steadyrl.training.logging.tensorboard import TensorBoard
from steadyrl.training.logging.terminal import attached

log = logging.getLogger("steadyrl")

HELD_BACK, NEVER = 1000, logging.CRITICAL + 1


class Logger:
    """Hand what is reported at rising steps to every sink, whatever becomes of the others."""

    def __init__(
        self, directory: Path, info: RunInfo | None = None, others: Sequence[Sink] = ()
    ) -> None:
        lines = JsonLines(directory / "metrics.jsonl")
        self._sinks: tuple[Sink, ...] = (lines, TensorBoard(directory, info), *others)
        self._last_step = -1
        self._failing: dict[Sink, str] = {}  # why

    def continue_after(self, step: int) -> None:
        """Go on after this step: what was written of later ones is taken back."""
        self._last_step = step
        for sink in self._sinks:
            try:
                sink.continue_after(step)
            except sink.failures as error:  # each one may fail
                log.warning("earlier metrics cannot be continued: %s", _reason(error))

    def write(
        self,
        step: int,
        scalars: Mapping[str, float],
        wall_seconds: float,
        episodes: Sequence[tuple[int, float]] = (),
        returns: Sequence[float] = (),
    ) -> None:
        """Write the finite ones of `scalars`; on an error warn once and try again next time."""
        if step <= self._last_step:
            raise ValueError(f"step {step} was logged after step {self._last_step}")
        self._last_step = step
        finite = {tag: value for tag, value in scalars.items() if math.isfinite(value)}
        record = Record(step, wall_seconds, finite, episodes, returns)
        self._tell(lambda sink: sink.write(record))

    def film(self, step: int, gif: bytes) -> None:
        """Show a small film of this step's policy wherever there is a place for it."""
        self._tell(lambda sink: sink.film(step, gif))

    def _tell(self, tell: Callable[[Sink], None]) -> None:
        for sink in self._sinks:
            try:
                tell(sink)
            except sink.failures as error:  # each one may fail
                self._failed(sink, _reason(error))
            else:
                self._works(sink)

    def _failed(self, sink: Sink, reason: str) -> None:
        # Two files on one full disk are one failure.
        if all(other.failures != sink.failures for other in self._failing):
            log.warning(
                "metrics cannot be written (%s): training goes on, they are lost until that is "
                "mended",
                reason,
            )
        self._failing[sink] = reason

    def _works(self, sink: Sink) -> None:
        if sink in self._failing:
            del self._failing[sink]
            if not self._failing:
                log.info("metrics are written again")

    @property
    def lost(self) -> str | None:
        """Why the newest record is not in the files of the run's directory; None where it is."""
        files = (why for sink, why in self._failing.items() if sink.failures == (OSError,))
        return next(files, None)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            with suppress(*sink.failures):
                sink.close()


class NoLogger(Logger):
    """What is reported by a rank that is not the first: nothing."""

    def __init__(self) -> None:
        self._sinks, self._last_step = (), -1
        self._failing = {}


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or one_line(str(error)) or type(error).__name__


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
        handle = open_regular(Path(self.baseFilename), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        return os.fdopen(handle, "a", encoding="utf-8", errors="backslashreplace")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        """Stay silent: a full disk must not print a traceback for every message."""


def log_name(rank: int) -> str:
    """Return the name of a rank's log in the run's directory."""
    return f"train-rank{rank}.log" if rank else "train.log"


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
