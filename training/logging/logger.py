"""Log messages of a run, and its metrics, written to every sink.

Write errors (full disk) are logged and never stop training.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path

from steadyrl.core.errors import one_line
from steadyrl.core.files import open_regular
from steadyrl.training.logging.sinks import METRICS, JsonLines, Record, RunInfo, Sink
from steadyrl.training.logging.terminal import attached

log = logging.getLogger("steadyrl")

MAX_HELD = 1000  # messages until the run has a directory; the first of more are dropped


class Logger:
    """Write the metrics of a step to every sink; a failing sink does not affect the others."""

    def __init__(
        self,
        directory: Path,
        info: RunInfo | None = None,
        others: Sequence[Sink] = (),
        *,
        tensorboard: bool = True,
    ) -> None:
        self.tensorboard = tensorboard
        files: list[Sink] = [JsonLines(directory / METRICS)]
        if tensorboard:
            from steadyrl.training.logging.tensorboard import TensorBoard  # imports tensorboard

            files.append(TensorBoard(directory, info))
        self._sinks: tuple[Sink, ...] = (*files, *others)
        self._last_step = -1
        self._failing: dict[Sink, str] = {}  # failing sinks and the reason of each

    def continue_after(self, step: int) -> None:
        """Resume after `step`: drop metrics that were logged at later steps."""
        self._last_step = step
        for sink in self._sinks:
            try:
                sink.continue_after(step)
            except sink.failures as error:  # each one may fail
                log.warning(
                    "cannot drop metrics logged after the resumed step%s (%s): old ones may remain",
                    f" from {sink.name}" if sink.name else "",
                    _reason(error),
                )

    def write(
        self,
        step: int,
        scalars: Mapping[str, float],
        wall_seconds: float,
        episodes: Sequence[tuple[int, float]] = (),
        returns: Sequence[float] = (),
    ) -> None:
        """Write the finite scalars; warn once on an error and retry at the next step."""
        if step <= self._last_step:
            raise ValueError(f"step {step} was logged after step {self._last_step}")
        self._last_step = step
        finite = {tag: value for tag, value in scalars.items() if math.isfinite(value)}
        record = Record(step, wall_seconds, finite, episodes, returns)
        self._for_each_sink(lambda sink: sink.write(record))

    def write_video(self, step: int, gif: bytes) -> None:
        """Write the GIF preview of an evaluation video to the sinks that can show one."""
        self._for_each_sink(lambda sink: sink.write_video(step, gif))

    def _for_each_sink(self, call: Callable[[Sink], None]) -> None:
        for sink in self._sinks:
            try:
                call(sink)
            except sink.failures as error:  # each one may fail
                self._failed(sink, _reason(error))
            else:
                self._works(sink)

    def _failed(self, sink: Sink, reason: str) -> None:
        # One warning for all files: those on one full disk fail together.
        if all(other.name != sink.name for other in self._failing):
            log.warning(
                "cannot write metrics%s (%s). Training continues; metrics are dropped until "
                "writing works again.",
                f" to {sink.name}" if sink.name else "",
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
        """Why the newest record is missing in the run directory's files; None if it was written."""
        files = (why for sink, why in self._failing.items() if not sink.name)
        return next(files, None)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            with suppress(*sink.failures):
                sink.close()


class NoLogger(Logger):
    """The logger of every rank but the first: writes nothing."""

    def __init__(self) -> None:
        self.tensorboard = False
        self._sinks, self._last_step = (), -1
        self._failing = {}


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or one_line(str(error)) or type(error).__name__


class _FileFormatter(logging.Formatter):
    """Time, level, message and traceback, with control characters escaped."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return "".join(
            c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode()
            for c in super().format(record)
        )


class _Held(logging.Handler):
    """Hold messages until `begin`, then pass them on to a file.

    Closing it changes nothing: an environment that configures its own logging closes all handlers.
    """

    def __init__(self, file: logging.Handler) -> None:
        super().__init__()
        self._file = file
        self._waiting: deque[logging.LogRecord] | None = deque(maxlen=MAX_HELD)

    def emit(self, record: logging.LogRecord) -> None:
        """Hold a message, or pass it on."""
        if self._waiting is None:
            self._file.handle(record)
        else:
            self._waiting.append(record)

    def begin(self) -> None:
        """Pass on what is held, and each later message at once."""
        waiting, self._waiting = self._waiting or (), None
        for record in waiting:
            self._file.handle(record)


class _MessageFile(logging.FileHandler):
    def emit(self, record: logging.LogRecord) -> None:
        """Write a message; drop it if the file cannot be opened (full disk, no file handles)."""
        with suppress(OSError):
            super().emit(record)

    def _open(self) -> TextIOWrapper:
        handle = open_regular(Path(self.baseFilename), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        return os.fdopen(handle, "a", encoding="utf-8", errors="backslashreplace")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        """Ignore the error: a full disk must not print a traceback per message."""


def log_name(rank: int) -> str:
    """Return the name of a rank's log file."""
    return f"train-rank{rank}.log" if rank else "train.log"


@contextmanager
def to_file(path: Path, *, buffered: bool = False) -> Iterator[Callable[[], None]]:
    """Write log messages to `path`, with times and full tracebacks.

    With `buffered`, nothing is written until the yielded function is called.
    """
    file = _MessageFile(path, delay=True)
    file.setFormatter(_FileFormatter())
    handler = _Held(file)
    if not buffered:
        handler.begin()
    with ExitStack() as closed:
        closed.callback(_close, file)
        closed.enter_context(attached(handler))
        yield handler.begin


@contextmanager
def crash_stack_to(path: Path) -> Iterator[None]:
    """Let a crash in native code write the stack of this process's Python code to `path`."""
    if faulthandler.is_enabled() or not path.parent.exists():
        yield  # enabled by the user or another program; or rank 0 has not made the directory yet
        return
    with path.open("a") as file:
        faulthandler.enable(file, all_threads=False)
        try:
            yield
        finally:
            faulthandler.disable()


def _close(file: logging.Handler) -> None:
    with suppress(OSError):  # a full disk may fail again on close
        file.close()
