"""The progress bar of a terminal, with log messages printed above it."""

from __future__ import annotations

import logging
from contextlib import suppress

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.logging import RichHandler
from rich.text import Text

from steadyrl.core.clock import Activity
from steadyrl.training.logging.display import Display
from steadyrl.training.logging.terminal import clock_text, redirect_to_devnull

# Fields by importance: on a narrow terminal the last ones are dropped first.
BY_IMPORTANCE = (
    *("run", "steps", "percent", "doing", "left", "return", "speed", "memory", "cuda"),
    "learning",
)
GAP = 2  # spaces after each field
SHORTEST_BAR, LONGEST_BAR = 8, 30


class LiveConsole(Console):
    """A terminal that can be closed."""

    def on_broken_pipe(self) -> None:
        """Drop further output, where rich would exit."""
        redirect_to_devnull(self.file)


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


class Bar(Display):
    """One live line: steps, what the run is doing, speed, mean return, memory and time left."""

    def __init__(
        self, console: Console, total: int, label: str, activity: Activity | None = None
    ) -> None:
        super().__init__(total, label, activity)
        self._live = Live(self, console=console, auto_refresh=False, transient=True)

    def start(self) -> None:
        """Show the line, and let a thread redraw it."""
        try:
            self._live.start()
        except OSError:  # a closed terminal does not stop training
            self.give_up()
        else:
            super().start()

    def draw(self) -> None:
        """Redraw the line."""
        self._live.refresh()

    def give_up(self) -> None:
        """Write nothing any more: the terminal is gone."""
        redirect_to_devnull(self._live.console.file)

    def close(self) -> None:
        """Remove the line from the screen."""
        super().close()
        with suppress(OSError, IndexError):  # the latter of a line that could not be started
            self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        texts = {"run": self._label} if self._label else {}
        texts |= self._texts()
        width_left = options.max_width - 1 + GAP  # nothing comes after the last gap
        shown = set()
        for name in BY_IMPORTANCE:
            if name in texts and len(texts[name]) + GAP <= width_left:
                shown.add(name)
                width_left -= len(texts[name]) + GAP
        line = Text(no_wrap=True, overflow="crop")
        done = "-" if options.ascii_only else "━"
        colourless = console.no_color or console.color_system is None
        to_do = " " if options.ascii_only or colourless else done
        for name in texts:
            if name in shown:
                line.append(texts[name] + " " * GAP)
            if name == "steps" and width_left - GAP >= SHORTEST_BAR:
                width = min(width_left - GAP, LONGEST_BAR)
                full = min(width, width * (self._step or 0) // self._total)
                line.append(done * full, "bar.complete")
                line.append(to_do * (width - full) + " " * GAP, "bar.back")
        line.rstrip()
        yield line

    def _texts(self) -> dict[str, str]:
        """Return the fields: before the first step only what the run is doing."""
        found, filling, texts = self.doing(), self.filling, {}
        if self._step is not None:
            fields = self.texts
            texts = {name: " ".join(text.split()) for name, text in fields.items()}
            texts["steps"] = fields["steps"]
            if filling is not None:  # how long learning takes is not known yet
                texts.pop("left")
        if found is not None:
            what = f"{found.what}, {found.progress}" if found.progress else found.what
            return texts | {"doing": f"{what} {clock_text(found.seconds)}"}
        if filling is not None:
            texts["doing"] = f"filling the {filling.what} {self._step or 0:,}/{filling.until:,}"
        elif self._updates:
            texts["learning"] = "learning"
        return texts
