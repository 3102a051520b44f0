"""The progress bar of a terminal, with log messages printed above it."""

from __future__ import annotations

import logging
from contextlib import suppress

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.logging import RichHandler
from rich.text import Text

from steadyrl.training.logging.terminal import Status, redirect_to_devnull, status_texts

# Fields by importance: on a narrow terminal the last ones are dropped first.
BY_IMPORTANCE = ("run", "steps", "percent", "left", "return", "speed", "memory")
GAP = 2  # spaces after each field
SHORTEST_BAR, LONGEST_BAR = 8, 30


class AboveTheBar(RichHandler):
    """Handler that prints log messages above the progress bar."""

    def __init__(self, console: Console) -> None:
        super().__init__(
            console=console, show_time=False, show_path=False, show_level=False, markup=False
        )

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message; the terminal wraps what is too long, so that paths stay in one piece."""
        try:
            line = self.render_message(record, self.format(record))
            self.console.print(line, soft_wrap=True)
        except Exception:  # as in logging's handlers
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        """Drop further output: the terminal or pipe was closed."""
        redirect_to_devnull(self.console.file)


class Bar:
    """Progress bar: steps, speed, mean return, memory and time left, as far as they fit."""

    def __init__(self, console: Console, total: int, label: str = "") -> None:
        self._total, self._label = total, label
        self._status = Status(0, 0.0, None, 0.0)
        self._live = Live(self, console=console, refresh_per_second=4, transient=True)
        with suppress(OSError):  # a closed terminal does not stop training
            self._live.start()

    def show(self, status: Status) -> None:
        """Update the bar."""
        self._status = status

    def close(self) -> None:
        """Remove the bar from the screen."""
        with suppress(OSError):
            self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        texts = {"run": self._label} if self._label else {}
        texts |= status_texts(self._status, self._total)
        width_left = options.max_width - 1
        shown = set()
        for name in BY_IMPORTANCE:
            if name in texts and len(texts[name]) + GAP <= width_left:
                shown.add(name)
                width_left -= len(texts[name]) + GAP
        line = Text(no_wrap=True, overflow="crop")
        done, to_do = ("-", " ") if options.ascii_only else ("━", "━")
        for name in texts:
            if name in shown:
                line.append(texts[name] + " " * GAP)
            if name == "steps" and width_left - GAP >= SHORTEST_BAR:
                width = min(width_left - GAP, LONGEST_BAR)
                full = min(width, width * self._status.step // self._total)
                line.append(done * full, "bar.complete")
                line.append(to_do * (width - full) + " " * GAP, "bar.back")
        yield line
